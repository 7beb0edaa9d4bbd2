#!/bin/sh
# redis.sh serve | ping: the server, or its health check. The password never stands in a command line.
set -eu
password=$(cat "$REDIS_PASSWORD_FILE")
if [ "$1" = ping ]; then
    client=$(command -v valkey-cli || command -v redis-cli)
    test "$(REDISCLI_AUTH=$password "$client" ping)" = PONG
    exit
fi
server=$(command -v valkey-server || command -v redis-server)
# A full server refuses writes: evicting an episode would lose what was acknowledged.
exec "$server" - <<CONFIG
port ${REDIS_PORT:-6379}
dir ${REDIS_DIR:-/var/lib/outloop-redis}
requirepass $password
save ""
appendonly yes
appendfsync ${REDIS_FSYNC:-everysec}
maxmemory ${REDIS_MAX_MEMORY:-1gb}
maxmemory-policy noeviction
CONFIG
