#!/usr/bin/env bash
# Runs the aarch64 wheel on an x86-64 machine: an arm64 Python under qemu-user, no chroot.
# Usage: wheels/arm64.sh PYTHON. Needs debootstrap, qemu-user-static, g++-aarch64-linux-gnu.
cd "$(dirname "$0")/.."
source wheels/common.sh
host_python=$1
root=$PWD/build/arm64/root        # Debian 13 for arm64 with Python 3.13, kept between runs
libraries=$PWD/build/arm64/python # torch for it, kept between runs
wheel_site=$PWD/build/arm64/wheel

if [[ ! -e $root.done ]]; then
  say "arm64 root"
  rm -rf "$root"
  mkdir -p "$root"
  debootstrap --arch=arm64 --foreign --variant=minbase --include=python3 trixie "$root" >"$root.log"
  for package in "$root"/var/cache/apt/archives/*.deb; do dpkg -x "$package" "$root"; done
  touch "$root.done"
fi

# install_arm64 FOLDER [pip argument...]: pip chooses files for arm64, and runs none of their code.
install_arm64() {
  rm -rf "$1"
  "$host_python" -m pip install --quiet --no-deps --no-compile --target "$1" --only-binary :all: \
    --implementation cp --python-version 3.13 --abi cp313 --abi abi3 --abi none \
    --platform manylinux_2_34_aarch64 --platform manylinux_2_28_aarch64 \
    --platform manylinux2014_aarch64 --platform any "${@:2}"
}

if ! cmp -s wheels/arm64-requirements.txt "$libraries.requirements"; then
  say "torch for arm64"
  install_arm64 "$libraries" -r wheels/arm64-requirements.txt
  cp wheels/arm64-requirements.txt "$libraries.requirements"
fi
install_arm64 "$wheel_site" wheels/ringfp4-*_aarch64.whl

say "the wheel on arm64 (emulated: importing torch alone takes about 90 s)"
# The driver tests compile their recording driver with `cc`; here that is the cross compiler, which
# runs natively since qemu hands the start of other programs to the host.
mkdir -p build/arm64/bin
ln -sf "$(command -v aarch64-linux-gnu-gcc)" build/arm64/bin/cc
PATH=$PWD/build/arm64/bin:$PATH PYTHONPATH=$wheel_site:$libraries OMP_NUM_THREADS=1 \
  qemu-aarch64-static -L "$root" "$root/usr/bin/python3.13" -W ignore wheels/arm64_check.py
