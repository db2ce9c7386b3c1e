#!/usr/bin/env bash
# Checks what wheels/build.sh built, as a user would meet it. Usage: wheels/verify.sh PYTHON
# [--quick], the development environment's. --quick leaves out what takes minutes: gigabytes of
# torch for Python 3.12, builds on other Pythons, and the emulated arm64 machine.
cd "$(dirname "$0")/.."
source wheels/common.sh
dev_python=$1
quick=${2:-}
verify=$PWD/build/verify
rm -rf "$verify"
mkdir -p "$verify"

say "metadata"
"$dev_python" -m twine check --strict wheels/*.whl wheels/*.tar.gz

say "platform tags"
for wheel in wheels/*.whl; do
  tag=${wheel##*-abi3-}
  "$dev_python" -m auditwheel show "$wheel" 2>/dev/null | tr '\n' ' ' >"$verify/auditwheel"
  grep -o "consistent with the following platform tag: \"${tag%.whl}\"" "$verify/auditwheel"
done

say "contents"
"$dev_python" wheels/check_contents.py wheels

# fresh_venv NAME VERSION: an environment with nothing but pip.
fresh_venv() { "$(find_python "$2")" -m venv "$verify/$1"; }

# smoke NAME: what must work in an environment without a compiler, the DSL and a GPU.
smoke() {
  say "$1: doctor and demo"
  (
    cd "$verify"
    run() { env -i "PATH=$verify/$1/bin" "HOME=$verify" "$verify/$1/bin/python" "${@:2}"; }
    run "$1" - <<'CODE'
import importlib.util, shutil, sys
found = [tool for tool in ("cc", "gcc", "nvcc", "ptxas") if shutil.which(tool)]
sys.exit(f"not a clean environment: {found}" if found or importlib.util.find_spec("cutlass") else 0)
CODE
    run "$1" -m ringfp4
    run "$1" -m ringfp4.demo --cpu
  )
}

# rebuild NAME: kernels for a shape of the user's own, from the installed package and its extra.
rebuild() {
  say "$1: kernels for another shape"
  "$verify/$1/bin/python" -m pip install --quiet "ringfp4[build]"
  (
    cd "$verify"
    "$1/bin/python" -m ringfp4.build_cubins --linear up=256x512 --arch sm_120f --out "$1-cubins"
    "$1/bin/python" -m ringfp4 "$1-cubins" # verifies them
  )
}

# from_sdist NAME [pip argument...]: builds, compiling every kernel again, and compares the cubins.
from_sdist() {
  local python=$verify/$1/bin/python installed
  PIP_CACHE_DIR=$("$python" -m pip cache dir) XDG_CACHE_HOME=$verify/cache-$1 \
    "$python" -m pip install --quiet "${@:2}" wheels/ringfp4-*.tar.gz
  installed=$(echo "$verify/$1"/lib/python3.*/site-packages/ringfp4/runtime/cubins)
  diff -r "$installed" build/wheels/cubins-x86_64 && echo "$1: the same cubins as in the wheel"
}

say "sdist on Python 3.11"
fresh_venv sdist-3.11 3.11
from_sdist sdist-3.11 "${TORCH:-torch}"
smoke sdist-3.11
rebuild sdist-3.11

[[ $quick == --quick ]] && exit

say "x86-64 wheel on Python 3.12, which brings its torch"
fresh_venv wheel-3.12 3.12
"$verify/wheel-3.12/bin/python" -m pip install --quiet --only-binary :all: wheels/ringfp4-*_x86_64.whl
smoke wheel-3.12
rebuild wheel-3.12

for version in 3.12 3.13; do
  say "sdist on Python $version"
  fresh_venv "sdist-$version" "$version"
  from_sdist "sdist-$version" --no-deps
done

wheels/arm64.sh "$dev_python"
