"""The recurrent drafter (ReDrafter): not built yet; see the table of methods in the README."""
