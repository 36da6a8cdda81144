#!/usr/bin/env bash
# Build the core with ASan, UBSan, bounds checks and its own assertions in build/sanitize, and run the torch-free unit
# and property tests on it. Torch stays out: it is not built for the sanitizers, and the core is what they are for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
base=build/sanitize
export EMBCACHE_CHECKED=1
EMBCACHE_SANITIZE=address,undefined "$python" setup.py --quiet build --build-base "$base" --build-lib "$base/lib"

mapfile -t tests < <(grep -rLE '^\s*(import|from) (torch|examples|dlrm)|embcache\.(manager|modules|buffer|optim|devices|features)|EmbCacheManager|Collection' \
    tests/unit tests/property --include='test_*.py' | sort)
echo "sanitize: ${#tests[@]} test files"

# detect_leaks=0: the interpreter itself leaks by design. allocator_may_return_null=1: tests ask for too much memory.
export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:strict_string_checks=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export PYTHONMALLOC=malloc PYTHONSAFEPATH=1 PYTHONPATH="$PWD/$base/lib"
"$python" -m pytest -q -p no:cacheprovider --timeout=1800 --hypothesis-profile=few "${tests[@]}"
