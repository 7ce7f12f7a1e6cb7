"""The recurrent drafter (ReDrafter): its head, its training job, its beams as a drafter for
`decoding`, and its commands.
"""

from jobs.interrupts import end_imports_quietly

end_imports_quietly()
