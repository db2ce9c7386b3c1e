#!/usr/bin/env bash
# Builds both wheels and the sdist into wheels/. Usage: wheels/build.sh PYTHON, an interpreter
# with this package and its extras `build` and `dev`. Same commit and compilers, same bytes.
cd "$(dirname "$0")/.."
source wheels/common.sh
dev_python=$1
python=$(find_python 3.12) # the oldest that the stable ABI cp312 can be built with
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}

if ! command -v aarch64-linux-gnu-g++ >/dev/null; then
  echo "no cross compiler: apt-get install g++-aarch64-linux-gnu" >&2
  exit 1
fi
[[ -z $(git status --porcelain) ]] || echo "warning: the tree has changes that no commit describes" >&2
rm -rf build/wheels wheels/*.whl wheels/*.tar.gz

# What is compiled for the first folder is taken from the builder's cache for the second.
build_cubins() { # build_cubins MACHINE ARCH...
  say "cubins for $1"
  "$dev_python" -m ringfp4.build_cubins --shapes shapes/h3.toml --arch "${@:2}" --out "build/wheels/cubins-$1"
}
build_cubins aarch64 sm_121a sm_120f
build_cubins x86_64 sm_121a sm_120f sm_90a

build_wheel() { # build_wheel MACHINE [option...]
  say "wheel for $1"
  "$python" -m pip wheel --quiet --no-deps --wheel-dir wheels . \
    "-Cbuild-dir=build/wheels/$1" \
    "-Cwheel.tags=cp312-abi3-manylinux_2_34_$1" \
    "-Ccmake.define.RINGFP4_CUBINS=$PWD/build/wheels/cubins-$1" \
    "${@:2}"
}
build_wheel x86_64
build_wheel aarch64 "-Ccmake.toolchain-file=$PWD/cmake/aarch64.cmake"

say "sdist"
"$dev_python" -m build --sdist --outdir wheels . >/dev/null

say "built from $(git describe --always --dirty)"
(cd wheels && ls -l --block-size=1 ./*.whl ./*.tar.gz && sha256sum ./*.whl ./*.tar.gz)
