"""The recurrent drafter (ReDrafter): its head, training job, drafter and commands."""

from jobs.interrupts import end_imports_quietly
from jobs.openmp import spin_briefly

spin_briefly()
end_imports_quietly()
