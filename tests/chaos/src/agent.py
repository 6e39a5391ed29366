# What runs in every sandbox: prints lines that anybody can compute, notes outside of Towpath's reach what it did, and ends as it was told.
import hashlib, json, os, sys, threading, time

job = json.loads(os.environ["TOWPATH_TASK"])
here = "/workspace/" + job["tag"]
os.makedirs(here, exist_ok=True)


def note(name, text):
    with open(here + "/" + name, "a") as file:
        file.write(text + "\n")


note("started", os.environ["TOWPATH_EPOCH"])


def listen():
    with open(os.environ["TOWPATH_STEER_FIFO"]) as fifo:
        for line in fifo:
            note("steers", line.rstrip("\n"))


threading.Thread(target=listen, daemon=True).start()

for name, digest in job["files"]:
    with open(os.environ["TOWPATH_ATTACHMENTS_DIR"] + "/" + name, "rb") as file:
        if hashlib.sha256(file.read()).hexdigest() != digest:
            note("wrong", name)

for n in range(job["lines"]):
    data = b"%s %08d %s\n" % (job["tag"].encode(), n, hashlib.sha256(b"%s %d" % (job["tag"].encode(), n)).hexdigest().encode())
    while data:
        data = data[os.write(1, data):]
    if n % job["every"] == 0:
        note("printed", str(n + 1))
        time.sleep(job["pause"])
note("printed", str(job["lines"]))

if job["output"]:
    with open(os.environ["TOWPATH_OUTPUTS_DIR"] + "/" + job["tag"], "w") as file:
        file.write(job["tag"])
while True:
    # Beside the spools, whose disk may be full: an agent that minds waits.
    try:
        with open(os.environ["TOWPATH_RESULT_FILE"], "w") as file:
            file.write("result of " + job["tag"])
        break
    except OSError:
        time.sleep(0.1)
note("ended", "")
sys.stdout.flush()
os._exit(job["exit"])
