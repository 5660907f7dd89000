# SPDX-License-Identifier: Apache-2.0
# Usage: doctor.sh FILE SECONDS CHECK…
# Runs `kvlink doctor` every SECONDS and prints what it finds. FILE exists while it finds no failure and each CHECK passes.
file=$1 every=$2
shift 2
trap 'exit 0' TERM  # runs between two commands, so no command may take long

ready() {
  kvlink doctor >"$file.found" 2>&1
  verdict=$?
  cat "$file.found"
  for check in "$@"; do
    grep -q "^pass  $check  " "$file.found" || { echo "does not pass: $check"; verdict=1; }
  done
  return "$verdict"
}

while :; do
  if ready "$@"; then touch "$file"; echo ready; else rm -f "$file"; echo not ready; fi
  slept=0
  while [ "$slept" -lt "$every" ]; do
    sleep 1
    slept=$((slept + 1))
  done
done
