"""What the exit code of `hyjax train` says to whatever started it."""

OK = 0
ERROR = 1  # a fault in the code, with its traceback
USAGE = 2  # something a person did wrong, said in one line
NOT_FINITE = 3  # a loss or gradient was not finite; the same command would meet it again
CHECKPOINT = 4  # a checkpoint could not be written or read: the disk, not the run
PREEMPTED = 75  # SIGTERM came and the state is saved: start the same command again
STALLED = 76  # no step completed in time: every thread's stack is in the workdir; start again
INTERRUPTED = 130  # Ctrl-C, after saving
