"""The viewer over many rollouts: indexing, the first page once the index exists, memory.

    python benchmarks/viewer.py [--rollouts 100000] [--one-file]

The rollouts are copies of examples/rollouts.jsonl.gz with new ids, in one compressed file a step as
a training run writes them, or in one compressed file. Leaves with 1 if the first page takes 2 s or
more, from the start of the command to the whole page, in CPU seconds of its process: on a machine
with nothing else to do these are the seconds that pass, on a shared one they are comparable.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples/rollouts.jsonl.gz"
LIMIT = 2.0
A_STEP = 512
REQUESTS = {
    "newest": "",
    "page 1,000": "offset=60000",
    "text": "text=lantern",
    "reward, sorted": "reward=%3E0.5&sort=advantage",
    "step range": "step=10-20&searches=2",
}


def write(folder: Path, count: int, one_file: bool) -> int:
    """Write copies of the sample; return how many bytes they have unpacked."""
    with gzip.open(EXAMPLE, "rt", encoding="utf-8") as file:
        sample = [json.loads(line) for line in file]
    size = made = step = 0
    target: Any = None
    (folder / "trajectories").mkdir(parents=True)
    while made < count:
        if target is None or (not one_file and made % A_STEP == 0):
            if target is not None:
                target.close()
            step += 1
            name = folder / f"trajectories/step-{step:06d}.jsonl.gz"
            target = gzip.open(name, "wt", encoding="utf-8", compresslevel=1)  # noqa: SIM115
        data = sample[made % len(sample)]
        copy = made // len(sample)
        data |= {"id": f"c{copy}-{made}", "group": f"c{copy}-g{made % len(sample) // 8}"}
        data["step"] = made // A_STEP
        line = json.dumps(data) + "\n"
        size += len(line)
        target.write(line)
        made += 1
    target.close()
    return size


class Command:
    """`evenhand view` as a user starts it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.began = time.perf_counter()
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "evenhand", "view", str(folder), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise SystemExit(f"evenhand view said: {line!r}")
        self.address = found.group()

    def get(self, path: str = "") -> str:
        with urllib.request.urlopen(self.address + path, timeout=120) as answer:
            return str(answer.read().decode())

    def work(self) -> float:
        """CPU seconds since the start of the command."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """Resident megabytes now."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", text)
        return int(found.group(1)) / 1024 if found else float("nan")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--one-file", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name, "run"), Path(name, "cache")
        size = write(folder, options.rollouts, options.one_file)
        print(f"{options.rollouts:,} rollouts, {size / 1e6:,.0f} MB unpacked")
        first = Command(folder, cache)
        first.get()
        seconds, work, memory = time.perf_counter() - first.began, first.work(), first.memory()
        print(f"first start, index made:  {work:7.2f} CPU s, {seconds:.1f} s, {memory:.0f} MB")
        first.stop()
        index = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
        print(f"index on disk:            {index / 1e6:7.0f} MB")
        times = []
        for last in (False, False, True):
            command = Command(folder, cache)
            opened, before = time.perf_counter(), command.work()
            page = command.get()
            done, after = time.perf_counter(), command.work()
            times.append((after, done - command.began, after - before, done - opened))
            if not last:
                command.stop()
        work, seconds, request, waited = sorted(times)[1]
        print(f"next starts, to the page: {work:7.2f} CPU s, {seconds:.2f} s (median of 3)")
        print(f"  the page alone:         {request:7.2f} CPU s, {waited:.2f} s")
        key = page.partition('data-key="')[2].partition('"')[0]
        for label, path in [*((k, f"rows?{v}") for k, v in REQUESTS.items()),
                            ("a rollout, its group", f"rollout/{key}")]:  # fmt: skip
            began = time.perf_counter()
            command.get(path)
            print(f"  {label + ':':24}{1000 * (time.perf_counter() - began):7.0f} ms")
        print(f"resident afterwards:      {command.memory():7.0f} MB")
        command.stop()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"peak of all starts:       {peak:7.0f} MB")
    if work >= LIMIT:
        print(f"FAILED: the first page took {work:.2f} s, the limit is {LIMIT:g} s")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
