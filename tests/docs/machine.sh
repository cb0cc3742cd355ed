# What the commands of a document find, sourced by their shell: a root directory made by enter.sh,
# and a folder for what has to be on a disk.
set -eEuo pipefail
folder=$1
at=
trap 'echo "$at: failed with $?: $BASH_COMMAND"' ERR
export PATH=$PWD/.venv/bin:$PATH
clients=$PWD/.venv-clients/bin/python

# A mount as documents have it.
mounted() {
    mkdir --parents /mnt/kv
    kvfs mount /mnt/kv -o "ram=64M,nvme=/data/kvfs,nvme_size=1G${1:+,$1}"
}

# A real store at port 9000, with an empty bucket.
with_bucket() {
    mkdir --parents /mnt/kv
    S3_ACCESS_KEY=kvfs S3_SECRET_KEY=kvfs-secret S3_STORE=memstore \
        scripts/s3-server.sh start "$folder/s3" 9000 2>"$folder/s3.log" >/dev/null
    AWS_ACCESS_KEY_ID=kvfs AWS_SECRET_ACCESS_KEY=kvfs-secret python -c '
import boto3
boto3.client("s3", endpoint_url="http://127.0.0.1:9000").create_bucket(Bucket="my-bucket")'
}

mounted_with_bucket() {
    with_bucket
    export AWS_ACCESS_KEY_ID=kvfs AWS_SECRET_ACCESS_KEY=kvfs-secret
    mounted s3=s3://my-bucket/kv,s3_endpoint=http://127.0.0.1:9000
}

# Requests of a few conversations, as in docs/simulate.md.
trace() {
    python -c '
import json, random
random.seed(7)
for number in range(400):
    talk = random.randrange(40) * 1000
    ids = [talk + turn for turn in range(random.randrange(1, 12))]
    length = 512 * len(ids)
    print(json.dumps(dict(timestamp=number * 50, input_length=length, output_length=9, hash_ids=ids)))
' >"$1"
}

# One request whose last block has no hash: a trace with blocks of so many tokens.
blocks() {
    python -c '
import json, sys
size = int(sys.argv[1])
ids = list(range(313))
print(json.dumps(dict(timestamp=0, input_length=313 * size + size // 2, output_length=9, hash_ids=ids)))
' "$2" >"$1"
}

# Two conversations as kv-cache-tester has them, one of them with a subagent.
conversations() {
    python -c '
import json
def request(t, ids):
    return {"t": t, "type": "n", "in": 64 * len(ids) + 9, "out": 5, "hash_ids": ids}
inner = {"t": 7.5, "type": "subagent", "requests": [request(0.0, [4, 5]), request(1.0, [4, 5, 6])]}
for name, requests in (
    ("trace_0001.json", [request(0.0, [1, 2]), inner, request(9.0, [1, 2, 3])]),
    ("trace_0002.json", [request(0.0, [1, 2]), request(3.0, [1, 2, 3])]),
):
    with open(name, "w") as file:
        json.dump({"id": name, "block_size": 64, "requests": requests}, file)
'
}
