#!/usr/bin/env bash
# Everything that needs a GPU, in one go: build for the GPU at hand, test, sanitize. Logs and JSON go to $OUT.
# Usage: [OUT=dir] [OMNIW4_CUDA_ARCHS=90a] scripts/gpu_check.sh [build] [test] [sanitize] [soak] [large]
# Without names: build, test, sanitize. LAYERS: blocks of the model of `large` (4).
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(build test sanitize)
export OMNIW4_CUDA_ARCHS=${OMNIW4_CUDA_ARCHS:-90a} OMNIW4_REQUIRE_GPU=1 PYTHONUNBUFFERED=1
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
failed=0

step() { # name, seconds at most, command...
  local name=$1 limit=$2
  shift 2
  local started=$SECONDS
  timeout "$limit" "$@" > "$OUT/$name.log" 2>&1
  local code=$?
  echo "$name: exit $code after $((SECONDS - started)) s"
  tail -n "${TAIL:-15}" "$OUT/$name.log"
  [ $code -eq 0 ] || failed=1
  return $code
}

for name in "${steps[@]}"; do
  case $name in
    build) step build 240 python3 scripts/build_kernels.py || exit 1
           cp build/kernels/report.json "$OUT/ptxas.json" ;;
    test) TAIL=60 step test "${TEST_SECONDS:-300}" python3 -m pytest -q -m gpu -p no:cacheprovider --tb=short \
            ${JOBS:+-n "$JOBS"} --junitxml "$OUT/test.xml" ${TESTS:-$(grep -rl mark.gpu tests --include 'test_*.py')} ;;
    sanitize) step sanitize "${SANITIZE_SECONDS:-280}" python3 scripts/sanitize.py --json "$OUT/sanitize.json" ;;
    soak) step soak "${SOAK_SECONDS:-120}" python3 scripts/soak.py steps --steps 10000 --json "$OUT/soak.json" ;;
    large) step large "${LARGE_SECONDS:-240}" python3 scripts/large_model.py --device cuda --layers "${LAYERS:-4}" \
             --json "$OUT/large.json" ;;
    *) echo "error: no step $name; there are build, test, sanitize, soak, large" >&2; exit 2 ;;
  esac
done
exit $failed
