# Runs stages side by side, as their needs allow, each with a log that is shown whole at its end; sourced by test.sh.
# shellcheck shell=bash
# shellcheck disable=SC2030,SC2031  # counts of a stage come back in a file

# What is known of each stage, by name. State: waiting, running, passed or FAILED.
declare -A stage_title stage_kind stage_needs stage_command stage_state stage_begin stage_seconds stage_cpu
stage_order=()
# Pid of a running stage -> its name.
declare -A stage_of_pid=()
stage_logs=build/stages

# stage NAME KIND TITLE [NEED...] -- COMMAND...: declares a stage. It starts when the stages that it needs have passed,
# in the order of declaration, and never after one failed. KIND `work` wants a core and takes one of the lanes; `wait`
# mostly waits for a network and starts at once.
stage() {
  local name=$1 needs=()
  stage_order+=("$name")
  stage_kind[$name]=$2 stage_title[$name]=$3 stage_state[$name]=waiting
  shift 3
  while [[ $1 != -- ]]; do
    needs+=("$1")
    shift
  done
  shift
  stage_needs[$name]=${needs[*]}
  stage_command[$name]=$(printf '%q ' "$@")
}

is_ready() {
  local need
  [[ ${stage_state[$1]} == waiting ]] || return 1
  for need in ${stage_needs[$1]}; do
    [[ ${stage_state[$need]} == passed ]] || return 1
  done
}

# In a shell of its own: its counts of tests go to a file, because variables do not come back.
start_stage() {
  local name=$1
  stage_state[$name]=running
  stage_begin[$name]=$SECONDS
  printf -- '-- %4d s: %s\n' "$SECONDS" "${stage_title[$name]}"
  # With job control a stage hears SIGINT as in a terminal; without, bash lets its children ignore it, and tests that
  # interrupt a program would wait for ever.
  set -m
  (
    passed=0 failures=0 skipped=0 status=0
    eval "${stage_command[$name]}" || status=1
    # A build that does not come about is a failure too, though no test was run.
    ((status == 0 || failures > 0)) || failures=1
    echo "$passed $failures $skipped" >"$stage_logs/$name.counts"
    times >"$stage_logs/$name.times"
    exit $status
  ) >"$stage_logs/$name.log" 2>&1 </dev/null &
  stage_of_pid[$!]=$name
  set +m
}

# cpu_seconds FILE: user and system time of the programs in what `times` printed, which says what a stage costs wherever
# it runs beside others.
cpu_seconds() {
  [[ -s $1 ]] || { echo 0; return 0; }
  tail -n 1 "$1" | tr 'ms' '  ' | awk '{ printf "%d", 60 * ($1 + $3) + $2 + $4 }'
}

# finish_stage NAME STATUS: shows its log and adds its counts to `passed`, `failures` and `skipped`.
finish_stage() {
  local name=$1 result=passed numbers=(0 1 0)
  (($2 == 0)) || result=FAILED
  stage_state[$name]=$result
  stage_seconds[$name]=$((SECONDS - stage_begin[$name]))
  printf '\n== %s: %s (%d s, at %d s)\n' "${stage_title[$name]}" "$result" "${stage_seconds[$name]}" "$SECONDS"
  cat "$stage_logs/$name.log"
  echo
  stage_cpu[$name]=$(cpu_seconds "$stage_logs/$name.times")
  if [[ -s $stage_logs/$name.counts ]]; then read -ra numbers <"$stage_logs/$name.counts"; fi
  passed=$((passed + numbers[0]))
  failures=$((failures + numbers[1]))
  skipped=$((skipped + numbers[2]))
}

# Starts what may start; `lanes` stages of kind `work` at a time.
start_stages() {
  local lanes=$1 name working=0
  for name in "${stage_of_pid[@]}"; do
    [[ ${stage_kind[$name]} != work ]] || working=$((working + 1))
  done
  for name in "${stage_order[@]}"; do
    is_ready "$name" || continue
    if [[ ${stage_kind[$name]} == work ]]; then
      ((working < lanes)) || continue
      working=$((working + 1))
    fi
    start_stage "$name"
  done
}

# Prints the ids of a process and of all that it started.
process_tree() {
  local child children=()
  echo "$1"
  read -ra children 2>/dev/null <"/proc/$1/task/$1/children" || true
  for child in "${children[@]}"; do process_tree "$child"; done
}

# Ends all stages that run, with everything that they started.
end_stages() {
  local pid processes=()
  for pid in "${!stage_of_pid[@]}"; do
    mapfile -t -O "${#processes[@]}" processes < <(process_tree "$pid")
  done
  stage_of_pid=()
  ((${#processes[@]})) || return 0
  kill -TERM "${processes[@]}" 2>/dev/null || true
  sleep 2
  kill -KILL "${processes[@]}" 2>/dev/null || true
}

# run_stages LANES: all declared stages. Those that run when another fails are finished: what they find is worth knowing.
run_stages() {
  local lanes=$1 pid status failed=0
  passed=0 failures=0 skipped=0
  rm -rf "$stage_logs"
  mkdir -p "$stage_logs"
  trap 'end_stages' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  start_stages "$lanes"
  while ((${#stage_of_pid[@]})); do
    status=0
    wait -n -p pid "${!stage_of_pid[@]}" || status=$?
    finish_stage "${stage_of_pid[$pid]}" $status
    unset "stage_of_pid[$pid]"
    ((status == 0)) || failed=1
    ((failed)) || start_stages "$lanes"
  done
  print_stages $failed
  return $failed
}

# The table at the end, in the order of declaration, and the line that says it all.
print_stages() {
  local name result=passed row='%-50s %-8s %6s %7s\n' cpu=0
  (($1 == 0)) || result=FAILED
  # shellcheck disable=SC2059  # one format for all rows
  {
    printf "$row" stage result seconds "of CPU"
    for name in "${stage_order[@]}"; do
      case ${stage_state[$name]} in
        waiting) printf "$row" "${stage_title[$name]}" 'not run' - - ;;
        *)
          printf "$row" "${stage_title[$name]}" "${stage_state[$name]}" "${stage_seconds[$name]}" "${stage_cpu[$name]}"
          cpu=$((cpu + stage_cpu[$name]))
          ;;
      esac
    done
    printf "$row" 'all stages, side by side' "$result" "$SECONDS" "$cpu"
  }
  ((skipped == 0)) || printf '%d tests were skipped\n' "$skipped"
  printf '\n%d passed, %d failed\n' "$passed" "$failures"
}
