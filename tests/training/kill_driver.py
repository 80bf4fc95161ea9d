"""Trains a recipe to its end through `kill -9` at random moments: RECIPE RUN KILLS SEED.

Children are forked, so that the imports are paid once. Every second kill waits for a checkpoint
that is being written, and the child flushes slowly so that there is a moment to hit. Prints how
many kills hit a run before its end, and how many of these a half-written checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path


def child(recipe_file: Path, run: Path, *, is_slow: bool) -> None:
    from evenhand.training import checkpoint
    from evenhand.training.recipes import load_recipe
    from evenhand.training.setup import new_trainer, resumed_trainer

    if is_slow:
        flush = checkpoint._flush

        def slow(folder: Path) -> None:
            time.sleep(0.5)
            flush(folder)

        checkpoint._flush = slow
    if (run / "recipe.toml").is_file():
        trainer = resumed_trainer(run)
    else:
        trainer = new_trainer(load_recipe(recipe_file), run)
    trainer.run()
    trainer.close()


def fork(recipe_file: Path, run: Path, *, is_slow: bool) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        child(recipe_file, run, is_slow=is_slow)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def is_writing(run: Path) -> bool:
    return any((run / "checkpoints").glob(".step-*"))


def main() -> int:
    recipe_file, run, kills = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    generator = random.Random(int(sys.argv[4]))
    import torch

    import evenhand.training.setup  # noqa: F401 paid once

    torch.set_num_threads(1)
    hit = inside = 0
    for number in range(kills):
        wants_write = number % 2 == 1
        pid = fork(recipe_file, run, is_slow=wants_write)
        if wants_write:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not is_writing(run):
                time.sleep(0.001)
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    break
            time.sleep(generator.random() * 0.2)
        else:
            time.sleep(generator.random() * 1.2)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            hit += 1
            inside += is_writing(run)
        elif os.waitstatus_to_exitcode(status):
            return 1
    pid = fork(recipe_file, run, is_slow=False)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    sys.stdout.write(f"hit {hit} inside {inside}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
