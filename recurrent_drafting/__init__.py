"""The recurrent drafter (ReDrafter): its head, its training job, its beams as a drafter for `decoding`, and its commands."""
