#!/bin/sh
# Write the files that must be private to their reader, from this service's secrets; then run the command.
# /run/tidegate is in memory. libpq ignores a password file that others may read, so a mounted one would not do.
set -eu
umask 077

for file in /run/secrets/postgres_*; do
    [ -e "$file" ] || continue
    printf '%s:%s:*:%s:%s\n' "$PGHOST" "$PGPORT" "${file##*/postgres_}" "$(cat "$file")"
done > "$PGPASSFILE"

if [ -e /run/secrets/airflow_password ]; then
    printf '{"%s": "%s"}\n' "$TIDEGATE_AIRFLOW_USER" "$(cat /run/secrets/airflow_password)" > /run/tidegate/airflow_passwords.json
fi

if [ -e /run/secrets/metrics_token ]; then
    cat /run/secrets/metrics_token > /run/tidegate/metrics_token
fi

if [ -e /run/secrets/kafka_tidegate_password ]; then
    {
        printf 'security.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-256\nsasl.username=tidegate\n'
        printf 'sasl.password=%s\n' "$(cat /run/secrets/kafka_tidegate_password)"
    } > /run/tidegate/kafka.properties
fi

if [ "$1" = spark-submit ]; then
    jars=
    if [ -n "${TIDEGATE_SPARK_PACKAGES:-}" ]; then # fetched when Spark first starts with them, kept in its volume
        jars=$(python -c 'import sys; from tidegate.stack.components import java_libraries; java_libraries.print_spark_jars(sys.argv[1])' "$TIDEGATE_SPARK_PACKAGES")
    fi
    {
        cat /opt/tidegate/compose/spark.conf
        printf 'spark.connect.authenticate.token %s\n' "$(cat /run/secrets/spark_token)"
        [ -z "$jars" ] || printf 'spark.jars %s\n' "$jars"
    } > /run/tidegate/spark.conf
fi

exec "$@"
