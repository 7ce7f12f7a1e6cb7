#!/usr/bin/env bash
# Builds llama.cpp in build/llama_cpp/bin: llama-server, llama-speculative-simple and llama-bench. Needs
# cmake and a C++ compiler; 8 to 15 minutes on one core. Does nothing if the programs are there.
#
#   PYTHON          interpreter whose pip fetches the sources (default: .venv's, else python3)
#   JOBS            compile jobs at a time (default: all cores)
#   CMAKE_OPTIONS   further options, such as -DGGML_CUDA=ON beside an NVIDIA card
#
# The sources are those inside the source package of llama-cpp-python, which pip verifies.
set -euo pipefail
source "$(dirname "$0")/../environment.sh"
show_usage "$@"

PACKAGE="llama-cpp-python==0.3.36"
HASH="sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
PROGRAMS=(llama-server llama-speculative-simple llama-bench)
FOLDER="$ROOT/build/llama_cpp"
WANTED="$PACKAGE ${CMAKE_OPTIONS:-}"

if [ -f "$FOLDER/.built" ] && [ "$(cat "$FOLDER/.built")" = "$WANTED" ]; then exit 0; fi
for program in cmake c++; do
  command -v "$program" >/dev/null && continue
  echo "error: $program is not installed; building llama.cpp needs cmake and a C++ compiler" >&2
  exit 1
done
python="${PYTHON:-$VENV/bin/python}"
[ -x "$(command -v "$python")" ] || python=python3

mkdir -p "$FOLDER/source" "$FOLDER/bin"
say "Fetching $PACKAGE"
printf '%s --hash=%s\n' "$PACKAGE" "$HASH" > "$FOLDER/requirements.txt"
"$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$FOLDER" \
  --requirement "$FOLDER/requirements.txt"
tar xzf "$FOLDER"/llama_cpp_python-*.tar.gz -C "$FOLDER/source" --strip-components=1 --skip-old-files

say "Building llama.cpp, which takes some minutes"
# the page of the server is left out: its build would download it
cmake -S "$FOLDER/source/vendor/llama.cpp" -B "$FOLDER/cmake" -DCMAKE_BUILD_TYPE=Release \
  -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF \
  -DLLAMA_USE_PREBUILT_UI=OFF ${CMAKE_OPTIONS:-} > "$FOLDER/configure.log"
cmake --build "$FOLDER/cmake" --target "${PROGRAMS[@]}" --parallel "${JOBS:-$(nproc)}" \
  > "$FOLDER/build.log" 2>&1 || { tail -n 20 "$FOLDER/build.log" >&2; exit 1; }
for program in "${PROGRAMS[@]}"; do cp "$FOLDER/cmake/bin/$program" "$FOLDER/bin/"; done
echo "$WANTED" > "$FOLDER/.built"
say "Built ${PROGRAMS[*]} in $FOLDER/bin"
