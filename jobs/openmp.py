"""How long OpenMP's threads spin while they wait for the others.

By default GNU's runtime, which PyTorch uses on Linux, lets a thread spin for some 5 ms before it
sleeps. On a machine with other work, each of a model's many small operations can wait that long
for a thread that has no core. Beside one busy process, a decode step in two threads took 4.4 times
as long as on an idle machine, and training stood still. With a shorter spin the step took twice as
long, and training made a third of its steps.

This module imports only the standard library: it takes effect before PyTorch is loaded.
"""

import os
import sys

SPINS = "GOMP_SPINCOUNT"


def spin_briefly() -> None:
    """Shorten the spinning of `python -m <job>` to some 50 microseconds.

    An environment that sets SPINS or OMP_WAIT_POLICY keeps its own. It has no effect on any other
    import of the package, as sys.argv[0] is "-m" only while Python looks for the module to run.
    """
    if sys.argv[:1] == ["-m"] and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPINS, "2000")
