"""One rank under torchrun: the runs of ``pretrain_runs``, whose imports the processes that it spawns are spared."""

import sys

if __name__ == "__main__":
    from pretrain_runs import main

    main(*sys.argv[1:])
