# Starts a server with its output on standard output and in a file:
#
#   bash serve.sh vllm serve MODEL …        VLLM_LOG_FILE and VLLM_LOG_MAX_BYTES say where and how much
#
# The exit code is the server's, SIGTERM reaches it, and its last line is kept. A pipe (`vllm serve | tee`) gives the
# exit code of tee, and leaves the signal with the shell. `exec vllm serve` makes vLLM process 1 of the container: when
# that ends, the kernel kills all others at once, and what is still in the pipe is lost, for `kubectl logs` too. So this
# shell stays process 1 and ends last.
file=${VLLM_LOG_FILE:-/var/log/vllm/vllm.log}
exec > >(exec python3 -IS "$(dirname "$0")/keep.py" "$file" ${VLLM_LOG_MAX_BYTES:+"$VLLM_LOG_MAX_BYTES"}) 2>&1
writer=$!

# a signal ends `wait` early; then it is waited for again
again=1 stop='' server=''
trap 'again=1 stop=1; [ -z "$server" ] || kill -TERM "$server" 2>/dev/null' TERM INT
"$@" &
server=$!
[ -z "$stop" ] || kill -TERM "$server" # it came before there was a server
while [ "$again" ]; do
  again=
  wait "$server"
  code=$?
done

# the writer ends when nobody holds the pipe any longer; a worker left behind by a crash may, so not for ever
exec >/dev/null 2>&1
(sleep 5 && kill -KILL "$writer") &
alarm=$!
wait "$writer"
kill "$alarm"
exit "$code"
