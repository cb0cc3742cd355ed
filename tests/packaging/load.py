"""Write and read files until the file `stop` exists; print what was done and what failed.

Runs on a machine without kvfs's tests: python3 load.py DIRECTORY STOP
"""

import hashlib
import json
import os
import random
import sys

directory, stop = sys.argv[1:]
seed = 19
chosen = random.Random(seed)
digests: dict[str, str] = {}
done = 0
failures: list[str] = []
while not os.path.exists(stop):
    name = f"{directory}/{chosen.randrange(64)}"
    try:
        if name in digests and chosen.random() < 0.7:
            with open(name, "rb") as file:
                found = hashlib.sha256(file.read()).hexdigest()
            if found != digests[name]:
                failures.append(f"{name}: other bytes")
        else:
            data = chosen.randbytes(chosen.choice([4096, 65536, 1 << 20]))
            with open(f"{name}.tmp", "wb") as file:
                file.write(data)
            os.rename(f"{name}.tmp", name)
            digests[name] = hashlib.sha256(data).hexdigest()
    except OSError as error:
        failures.append(f"{name}: {error}")
    done += 1
    if done == 1:
        open(f"{stop}.begun", "w").close()
print(json.dumps({"seed": seed, "done": done, "failures": failures}))
