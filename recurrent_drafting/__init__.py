"""The recurrent drafter (ReDrafter): its head, training job, drafter and commands."""

from jobs.interrupts import end_imports_quietly

end_imports_quietly()
