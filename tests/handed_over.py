"""A run handed over in another way: what the router and the nodes of a deployment have in common."""

from __future__ import annotations

import msgspec

from emulator.core.deployments import Admission, FirstToken, Preemption, TransferMode
from emulator.core.run_spec import RunSpec


def handed_over(
    run: RunSpec,
    *,
    first_token: FirstToken | None = None,
    admission: Admission | None = None,
    transfer_mode: TransferMode | None = None,
    preemption: Preemption | None = None,
    max_transfers_in_flight: int = 1,
) -> RunSpec:
    """`run` with what is given; KV leaves as a whole where it has to. A run of colocated nodes stays as it is."""
    if not run.router.disaggregated:
        return run
    router = msgspec.structs.replace(
        run.router,
        first_token=first_token or run.router.first_token,
        admission=admission or run.router.admission,
        transfer_mode=transfer_mode or run.router.transfer_mode,
        preemption=preemption or run.router.preemption,
    )
    whole = router.admission == "prefill_first" or router.transfer_mode == "pull"
    nodes = [
        msgspec.structs.replace(
            node,
            overlap="none" if whole else node.overlap,
            layer_groups=1 if whole else node.layer_groups,
            transfer_mode=router.transfer_mode,
            preemption=router.preemption,
            max_transfers_in_flight=max_transfers_in_flight,
        )
        for node in run.nodes
    ]
    return msgspec.structs.replace(run, router=router, nodes=tuple(nodes))
