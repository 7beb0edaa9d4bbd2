#!/bin/sh
# What must be there before the parts start: a policy to begin with, and the run. Runs at every `up`;
# what is there already is left alone.
set -eu
if [ -f /project/prepare.sh ]; then
    sh /project/prepare.sh
fi
exec outloop init "/project/$CONFIG" \
    --set 'run.name="stack"' --set 'run.dir="runs"' \
    --set 'run.keys_file="/keys/run/keys.json"' \
    --set 'buffer.redis_url="redis://redis:6379"' \
    --set 'buffer.redis_password_file="/keys/redis/password"' \
    --set 'router.host="0.0.0.0"' --set 'server.host="0.0.0.0"' \
    --set 'telemetry.prometheus_host="0.0.0.0"' --set 'telemetry.prometheus_port=9100' \
    --set 'publish.transport="disk"' "$@"
