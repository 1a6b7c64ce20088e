#!/usr/bin/env bash
# Make the secrets that docker-compose.yml names, each in a file of its own:
#
#     compose/secrets.sh [FOLDER]
#
# Run it as the person who runs `docker compose`. A secret that exists is kept, so running it again is safe. To change the
# password of a Postgres role, change it in Postgres too (`\password ROLE` in psql): roles are created only once.
set -euo pipefail

here=$(dirname "$0")
folder=${1:-$here/secrets}

# These are mounted into containers that run as other users, which could not read a clone that was made with a narrow umask:
# Postgres would come up without roles, and never ask for them again.
for file in roles.sql kafka.properties kafka.sh; do
    [ -n "$(find "$here/$file" -perm -004)" ] || chmod a+rX "$here/$file"
done
[ -n "$(find "$here/kafka.sh" -perm -005)" ] || chmod a+rx "$here/kafka.sh"
umask 077
mkdir -p "$folder"
chmod 700 "$folder"

secret() { # name, bytes: URL-safe base64, written whole or not at all
    local file=$folder/$1
    if [ -e "$file" ]; then
        echo "kept $file"
        return
    fi
    head -c "$2" /dev/urandom | base64 | tr '+/' '-_' | tr -d '\n' > "$file.unfinished"
    # Each file is mounted alone into the containers that need it, whose users are not this one. So the file is readable
    # and the folder is closed: other accounts of this machine cannot reach it.
    chmod 444 "$file.unfinished"
    mv "$file.unfinished" "$file"
    echo "made $file"
}

for role in postgres tidegate_owner tidegate tidegate_stager tidegate_reader airflow; do
    secret "postgres_$role" 24
done
secret spark_token 48
secret kafka_tidegate_password 24
secret kafka_controller_password 24
secret airflow_password 18
secret metrics_token 32
secret fernet_key 32 # Fernet wants exactly 32 bytes
secret api_secret_key 48
secret jwt_secret 48
