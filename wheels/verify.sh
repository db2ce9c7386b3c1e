#!/usr/bin/env bash
# Checks what wheels/build.sh built, as a user would meet it. Usage: wheels/verify.sh PYTHON
# [--quick], the development environment's. --quick leaves out what downloads gigabytes: torch
# for other Pythons than PYTHON's and the emulated arm64 machine.
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
  machine=${wheel##*manylinux_2_34_}
  "$dev_python" -m auditwheel show "$wheel" >"$verify/auditwheel.txt"
  # Linked symbols may be older than the tag promises, never newer.
  grep -Eo "manylinux_2_[0-9]+_${machine%.whl}" "$verify/auditwheel.txt" | sort -V | head -1 |
    { read -r tag; echo "$wheel: $tag"; [[ ${tag#manylinux_2_} < 34z ]]; }
done

say "contents"
"$dev_python" wheels/check_contents.py wheels

# fresh_venv NAME VERSION: an environment with nothing but pip.
fresh_venv() { "$(find_python "$2")" -m venv "$verify/$1"; }

# smoke NAME: what works without a compiler, the DSL and a GPU, in an empty environment.
smoke() {
  local run=(env -i "PATH=$verify/$1/bin" "HOME=$verify" "$verify/$1/bin/python")
  (
    cd "$verify"
    "${run[@]}" -c 'import importlib.util, shutil, sys
sys.exit(any(map(shutil.which, ("cc", "gcc", "nvcc", "ptxas"))) or importlib.util.find_spec("cutlass") is not None)'
    "${run[@]}" -m ringfp4
    "${run[@]}" -m ringfp4.demo
  )
}
