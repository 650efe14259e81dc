"""The client of sandboxes: one async API over whatever carries the questions, a socket or a Ray actor.

    async with SandboxClient(transport, owner="run/engine-0") as client:
        sandbox = await client.create("s12-p3-m0", SandboxSpec())
        result = await sandbox.exec(ExecRequest(argv=("sh", "-c", "echo hello")), key="1")

What is safe to ask again when no answer came (`SandboxConnectionError`):

| question           | safe to repeat                                                                               |
|--------------------|----------------------------------------------------------------------------------------------|
| create             | yes: an identity names one sandbox; the same identity and spec give what there is |
| exec, call         | with the same `key`: it runs once in a sandbox, which keeps its result; without one never    |
| upload             | yes: the same bytes                                                                          |
| download, snapshot | yes: they change nothing                                                                     |
| adopt, renew, list | yes                                                                                          |
| close              | yes                                                                                          |

A sandbox belongs to its supervisor and is held by a lease; `renew` is the sign of life. Not here: what isolates
(`container.py`), who owns (`supervisor.py`), what survives a preemption (`session.py`).
"""
