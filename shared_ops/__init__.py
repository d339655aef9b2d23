"""Everything whose bits must agree between the sampler and the trainer lives here, once.

Each folder is one op: `op.py` states its reduction contract (the order of its sums) and holds the
public function, `reference.py` is the plain torch schedule. `opset.py` gathers the ops a model
calls, `attest.py` proves on the machine in use that the schedules obey their contracts.
"""
