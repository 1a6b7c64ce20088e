#!/bin/sh
# Start the broker: its properties are compose/kafka.properties and the passwords, which are in no argument and no environment.
# /run/tidegate is in memory. As in tidegate/stack/components/kafka.py.
set -eu
umask 077

binaries=/opt/kafka/bin
data=/var/lib/kafka/data/broker
run=/run/tidegate
password=$(cat /run/secrets/kafka_tidegate_password)
controller=$(cat /run/secrets/kafka_controller_password)
login=org.apache.kafka.common.security

client="$login.scram.ScramLoginModule required username=\"tidegate\" password=\"$password\";"
{
    cat /etc/tidegate/kafka.properties
    for listener in client host; do
        printf 'listener.name.%s.scram-sha-256.sasl.jaas.config=%s\n' "$listener" "$client"
    done
    printf 'listener.name.controller.plain.sasl.jaas.config=%s\n' \
        "$login.plain.PlainLoginModule required username=\"controller\" password=\"$controller\" user_controller=\"$controller\";"
} > "$run/server.properties"

# For the health check.
{
    printf 'security.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-256\n'
    printf 'sasl.jaas.config=%s\n' "$client"
} > "$run/client.properties"

if [ ! -e "$data" ]; then # once; unfinished storage is formatted again
    rm -rf "$data.unfinished"
    sed "s|^log\.dirs=.*|log.dirs=$data.unfinished|" "$run/server.properties" > "$run/format.properties"
    printf -- '--add-scram\nSCRAM-SHA-256=[name=tidegate,password=%s]\n' "$password" > "$run/format_arguments"
    # Its output says how the password is stored, and is not needed.
    "$binaries/kafka-storage.sh" format --config "$run/format.properties" \
        --cluster-id "$(head -c 8 /dev/urandom | od -An -tx1 | tr -d ' \n')" "@$run/format_arguments" > /dev/null
    rm "$run/format_arguments" "$run/format.properties"
    mv "$data.unfinished" "$data"
fi

exec "$binaries/kafka-server-start.sh" "$run/server.properties"
