#!/usr/bin/env bash
# Checks evenhand on a machine with a GPU and no network, in under eight minutes:
#
#   OUT=results scripts/gpu_check.sh                    # python3 with torch and transformers
#   PYTHON=/opt/env/bin/python scripts/gpu_check.sh     # another one
#   WHEELS=wheels scripts/gpu_check.sh                  # what that Python lacks, as wheels
#
# Brought along: this repository (nothing is built or installed), and models/smollm2-135m-instruct
# if it is to be trained (538 MB; see scripts/fetch_smollm2.py). Torch with CUDA comes from the
# machine. The first line of a failure names the packages that are missing there; fetch their wheels
# for its Python beforehand, each by name and without dependencies, for instance
#
#   pip download --no-deps --only-binary :all: --python-version 3.12 \
#     --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 --dest wheels \
#     transformers tokenizers rapidfuzz bm25s PyStemmer
#
# Writes $OUT/gpu_check.json (default: gpu_check/) and ends with code 1 if a check fails. Arguments
# go to scripts/gpu_check.py: --device cpu --small tries the script itself without a GPU.
set -euo pipefail

cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-gpu_check}
mkdir -p "$OUT"

if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
    --target "$site" "$WHEELS"/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
timeout "${SECONDS_AT_MOST:-480}" "$PYTHON" scripts/gpu_check.py --out "$OUT" "$@"
