#!/usr/bin/env bash
# Build a checked core (bounds checks, its own assertions) with sanitizers in build/sanitize, and run tests on it:
#   tools/sanitize.sh           ASan and UBSan, the torch-free unit and property tests
#   tools/sanitize.sh thread    TSan, the tests in which threads share a table, a planner or a pool
# Torch stays out: it is not built for the sanitizers, and the core is what they are for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
sanitizers=${1:-address,undefined}
base=build/sanitize/$sanitizers
export EMBCACHE_CHECKED=1
EMBCACHE_SANITIZE=$sanitizers "$python" setup.py --quiet build --build-base "$base" --build-lib "$base/lib"

if [ "$sanitizers" = thread ]; then
    tests=(tests/concurrency/test_{table,moves}_threads.py tests/regression/test_threads_stay_in_their_partitions.py
        tests/unit/test_{threads,dedup,spares,swap,moves,table_checkpoint,filter_sketches}.py tests/property/test_planner_machine.py)
    preload=$(gcc -print-file-name=libtsan.so)
    # Without randomized addresses: they may lie where the sanitizer keeps its shadow. The sanitizer's own end would
    # not be pytest's failure: it names the races in a file, which must not be there.
    run=(setarch --addr-no-randomize "$python")
    races=$PWD/$base/races
    rm -f "$races".*
    # die_after_fork=0: our children of fork start threads (promise I12).
    export TSAN_OPTIONS="die_after_fork=0 log_path=$races"
else
    mapfile -t tests < <(grep -rLE '^\s*(import|from) (torch|examples|dlrm|pairs|pipelines)|embcache\.(manager|modules|buffer|optim|devices|features)|EmbCacheManager|Collection' \
        tests/unit tests/property --include='test_*.py' | sort)
    preload="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
    run=("$python")
    races=
    # detect_leaks=0: the interpreter itself leaks by design. allocator_may_return_null=1: tests ask for too much memory.
    export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:strict_string_checks=1
    export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
    export PYTHONMALLOC=malloc
fi
echo "sanitize: $sanitizers, ${#tests[@]} test files"

export PYTHONSAFEPATH=1 PYTHONPATH="$PWD/$base/lib"
LD_PRELOAD=$preload "${run[@]}" -m pytest -q -p no:cacheprovider --timeout=1800 --hypothesis-profile=few "${tests[@]}"
if [ -n "$races" ] && compgen -G "$races.*" >/dev/null; then
    cat "$races".*
    echo "sanitize: data races, see above" >&2
    exit 1
fi
