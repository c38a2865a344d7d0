"""Replays the stored trees, drafters and losses of EAGLE-2, EAGLE-3, ViSpec and MSD."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from support.closeness import close
from support.engine.draws import (
    Drafting,
    Layer,
    causal,
    distance_loss,
    feature_loss,
    grow,
    ranking_loss,
    token_loss,
)
from support.golden.case import Reader
from vlmfast.core.drafting import Budget, Read, Round, Target
from vlmfast.core.layout import Kind, TokenLayout
from vlmfast.core.tree import Tree
from vlmfast.drafters.draft_eagle.drafter import EagleDrafter
from vlmfast.drafters.draft_eagle.module import EagleModule
from vlmfast.drafters.draft_vispec.module import VispecModule
from vlmfast.drafters.draft_vispec.stage import VispecDrafter

Data = Meta = Reader


def num_terms(meta: Meta, rows: int) -> int:
    """Terms of the output of a drafter's only layer over ``rows`` rows, including `fc`."""
    config = json.loads(meta["config"])
    return 5 * config["hidden_size"] + config["intermediate_size"] + rows


def same_tree(tree: Tree, data: Data, prefix: str = "", by_leaf: bool = True) -> None:
    """Tokens, mask, depths and paths."""
    assert list(tree.tokens) == data[prefix + "draft_tokens"][0].tolist()
    assert torch.equal(tree.mask().float(), data[prefix + "tree_mask"][0, 0])
    assert list(tree.depths) == data[prefix + "tree_position_ids"].tolist()
    paths = [tree.path(leaf) for leaf in tree.leaves()]
    if not by_leaf:  # sorted by their nodes, the end of a path after all
        paths.sort(key=lambda path: [*path, len(tree)])
    rows = torch.tensor([path + [-1] * (tree.depth + 1 - len(path)) for path in paths])
    assert torch.equal(rows, data[prefix + "retrieve_indices"])


# --- the tree -------------------------------------------------------------------------------------


def tree_case(data: Data, meta: Meta) -> None:
    """The tree, and every intermediate call of the drafter."""
    k, passes = meta.count("top_k"), meta.count("depth")
    assert data["logits_step0"].shape[1] == meta.count("vocab")
    ids = data["prompt_ids_with_sampled"][0].tolist()
    calls = 0

    def step(tokens: Tensor, origin: Tensor, mask: Tensor, level: int) -> Tensor:
        nonlocal calls
        calls += 1
        assert torch.equal(tokens, data[f"draft_call{level}_input_ids"][0])
        assert torch.equal(mask.float(), data[f"draft_call{level}_tree_mask"][0, 0])
        rows = len(ids) - 1  # of the drafter: the sampled token has no hidden state yet
        assert torch.equal(
            torch.full_like(tokens, rows + level), data[f"draft_call{level}_position_ids"]
        )
        return data[f"logits_step{level + 1}"]

    size = {"top_k": k, "depth": passes + 1, "nodes": meta.count("total_tokens_arg")}
    rank = Budget(size["nodes"], size["depth"]).rank
    tree = grow(ids[-1], data["logits_step0"], step, rank, **size)
    assert calls == passes
    processed = meta["logits_processor"] != "None"  # which sorts the paths
    same_tree(tree, data, by_leaf=not processed)


# --- drafters with weights ------------------------------------------------------------------------


def weights(data: Data) -> Data:
    """Stored weights under our names."""
    names = {"layers.0.": "layer.", "midlayer.": "layer."}
    found = {}
    for name, value in data.under("w.").items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        if name not in ("embed_tokens.weight", "t2d"):
            found[name] = value
    return found


def sizes(meta: Meta, **own: Any) -> dict[str, Any]:
    config = json.loads(meta["config"])
    return {
        "width": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "hidden": config["intermediate_size"],
        "eps": config["rms_norm_eps"],
        "theta": config.get("rope_theta", 10000.0),
        "input_norm": False,
        **own,
    }


def target_of(data: Data, module: EagleModule) -> Target:
    embed = data["w.embed_tokens.weight"]
    head = data.get("lm_head", embed)
    return Target(lambda ids: embed[ids], lambda x: x @ head.T, 32, 12, len(embed), trained=module)


def text(n: int) -> TokenLayout:
    return TokenLayout.text(torch.arange(n), torch.arange(n)[None])


def size_of(meta: Meta) -> tuple[int, int, int]:
    """Children, drafted tokens on a path, nodes."""
    return meta.count("top_k"), meta.count("depth") + 1, meta.count("total_tokens_arg")


def two_rounds(drafter: EagleDrafter, data: Data, meta: Meta, aux_hidden_states: int = 0) -> None:
    """The tree after a prompt, and the one after its accepted tokens."""
    _, depth, nodes = size_of(meta)
    budget = Budget(nodes, depth)
    ids, later = data["input_ids"][0].tolist(), data["r2_input_ids"][0].tolist()
    same_tree(drafter.propose(ids[-1], budget), data)
    stable = drafter.cache.length
    features = data["r2_hidden_states"][0]
    emitted = later[len(ids) :]
    done = Round(
        Tree.chain([ids[-1], *emitted[:-1]]),
        list(range(len(emitted))),
        emitted,
        torch.zeros(len(emitted), 1),
        None if aux_hidden_states else features,
        features.unflatten(1, (aux_hidden_states, -1)) if aux_hidden_states else None,
    )
    drafter.extend(done)
    same_tree(drafter.propose(emitted[-1], budget), data, "r2_")
    assert drafter.cache.length == stable + len(emitted)


def outputs(
    module: EagleModule,
    embeds: Tensor,
    features: Tensor,
    position: Tensor,
    image: Tensor | None = None,
) -> Tensor:
    """Outputs of whole sequences (B, S), each row with the rows before it."""
    return module.run(module.rows(embeds, features, image), position, causal)


def vispec_outputs(
    module: VispecModule, embeds: Tensor, features: Tensor, position: Tensor, image: Tensor
) -> Tensor:
    """Outputs of one sequence (S,); zeros for the image rows that are left out."""
    rows, source, _ = module.adapted(embeds, features, image, features.new_zeros(module.width))
    made = module.run(rows[None], position[None, source], causal)[0]
    return torch.zeros_like(features).index_put((source,), made)


def eagle_case(data: Data, meta: Meta) -> None:
    module = EagleModule(sizes(meta))
    module.load_state_dict(weights(data))
    ids, features = data["input_ids"][0], data["hidden_states"]
    embeds, n = data["w.embed_tokens.weight"][ids], features.shape[1]
    out = outputs(module, embeds[None, 1:], features, torch.arange(n)[None])
    close(out, data["drafter_out"], terms=num_terms(meta, n))
    drafter = EagleDrafter(target_of(data, module), module, *size_of(meta))
    drafter.prefill(Read(ids[:-1].tolist(), text(n), embeds[:-1], features[0]))
    two_rounds(drafter, data, meta)


def eagle3_case(data: Data, meta: Meta) -> None:
    drafted = len(data["w.lm_head.weight"])
    module = EagleModule(sizes(meta, kind="eagle3", draft_vocabulary=drafted))
    stored = weights(data)
    module.load_state_dict({"d2t": torch.zeros(drafted, dtype=torch.int64)} | stored)
    ids, features = data["input_ids"][0], data["hidden_states"]
    embeds, n = data["w.embed_tokens.weight"][ids], features.shape[1]
    out = outputs(module, embeds[None, 1:], features, torch.arange(n)[None])
    target = target_of(data, module)
    terms = num_terms(meta, n) + features.shape[2]  # of the aux hidden states
    close(out, data["drafter_out_prenorm"], terms=terms)
    logits = module.output(out, target.logits)
    close(logits, data["draft_logits"], terms=terms + out.shape[2])
    if "w.t2d" in data:
        assert torch.equal(module.vocabulary(), data["w.t2d"].nonzero().flatten())
    drafter = EagleDrafter(target, module, *size_of(meta))
    aux_hidden_states = features[0].unflatten(1, (3, -1))
    drafter.prefill(
        Read(ids[:-1].tolist(), text(n), embeds[:-1], aux_hidden_states=aux_hidden_states)
    )
    two_rounds(drafter, data, meta, aux_hidden_states=3)


def vispec_case(data: Data, meta: Meta) -> None:
    queries = meta.count("num_q")
    module = VispecModule(sizes(meta, queries=queries))
    module.load_state_dict(weights(data))
    ids, mask = data["input_ids"][0], data["image_mask"][0].bool()
    embeds, features = data["prompt_embeds"][0], data["hidden_states"]
    n = len(embeds)
    table = data["w.embed_tokens.weight"]
    ahead = torch.cat([embeds[1:], table[ids[-1:]]])
    assert torch.equal(ahead, data["shifted_embeds"][0])
    image = torch.where(torch.cat([mask[1:], mask.new_zeros(1)]), 0, -1)
    out = vispec_outputs(module, ahead, features[0], torch.arange(n), image)[None]
    terms = num_terms(meta, n)
    close(out, data["drafter_out_scattered"], terms=2 * terms)  # the adaptor is a layer, too
    adapted = module.imadpt(ahead[image == 0])
    close(adapted, data["adaptor_out_for_rows_3_11_of_shifted"][0], terms=terms)

    layout = text(n)
    layout = layout.replace(
        kind=torch.where(mask, int(Kind.IMAGE), int(Kind.TEXT)).to(torch.uint8),
        item=torch.where(mask, 0, -1).int(),
    )
    drafter = VispecDrafter(target_of(data, module), module, *size_of(meta))
    drafter.prefill(Read(ids[:-1].tolist(), layout, embeds, features[0]))
    close(drafter.seen[None], data["global_feature"], terms=terms)
    _, depth, nodes = size_of(meta)
    drafter.propose(int(ids[-1]), Budget(nodes, depth))
    close(drafter.cache.keys, data["kv_k"], terms=2 * terms)
    close(drafter.cache.values, data["kv_v"], terms=2 * terms)
    assert drafter.next == int(data["kv_next_position"])
    two_rounds(drafter, data, meta)


def msd_case(data: Data, meta: Meta) -> None:
    module = EagleModule(sizes(meta, kind="msd"))
    module.load_state_dict(weights(data))
    embeds, features = data["prompt_embeds"][0], data["hidden_states"][0]
    ids, n = data["input_ids_with_-200"][0].tolist(), len(features)
    at = ids.index(-200)
    rows = n - (len(ids) - 2)  # of the image; the last id is sampled
    mask = torch.zeros(n, dtype=torch.bool)
    mask[at : at + rows] = True
    layout = text(n).replace(
        kind=torch.where(mask, int(Kind.IMAGE), int(Kind.TEXT)).to(torch.uint8),
        item=torch.where(mask, 0, -1).int(),
    )
    drafter = EagleDrafter(target_of(data, module), module, *size_of(meta))
    drafter.prefill(Read([0] * n, layout, embeds, features))
    _, depth, nodes = size_of(meta)
    tree = drafter.propose(ids[-1], Budget(nodes, depth))
    terms = num_terms(meta, n)
    close(drafter.cache.keys, data["kv_k"], terms=terms)
    close(drafter.cache.values, data["kv_v"], terms=terms)
    same_tree(tree, data)


# --- training -------------------------------------------------------------------------------------


def ttt_case(data: Data, meta: Meta) -> None:
    config = sizes(meta)
    layer = Layer(
        config["width"],
        config["hidden"],
        config["heads"],
        config["kv_heads"],
        config["width"] // config["heads"],
        eps=config["eps"],
        theta=config["theta"],
        double=True,
    )
    layer.load_state_dict(weights(data))
    attend, hidden, step = Drafting(0), data["hidden_in"], 0
    assert torch.equal(data["ttt0_input_ids"], data["input_ids"])
    position = torch.arange(hidden.shape[1])[None]
    while f"ttt{step}_hidden_out" in data:
        embeds = data["embed"][data[f"ttt{step}_input_ids"]]
        hidden = layer(torch.cat([embeds, hidden], dim=-1), position + step, attend)
        step += 1
        stored = data[f"ttt{step - 1}_hidden_out"]
        close(hidden, stored, terms=step * num_terms(meta, hidden.shape[1]))
    assert step == 4


def losses_case(data: Data, meta: Meta) -> None:
    head, mask = data["lm_head"], data["loss_mask"][..., 0].bool()
    predicted, target = data["predicted_features"], data["target_features"]
    student, teacher = predicted @ head.T, target @ head.T
    features, tokens = feature_loss(predicted, target, mask), token_loss(student, teacher, mask)
    ranking = ranking_loss(student, teacher, mask)
    # Logits over the width, a softmax over the tokens, and a mean over all rows.
    terms = head.shape[1] + head.shape[0] + mask.numel()
    for ours, stored in {
        features: "eagle_vloss",
        tokens: "eagle_ploss",
        features + 0.1 * tokens: "eagle_total",
        10 * distance_loss(student, teacher, mask) + 0.1 * ranking: "vispec_stage2_loss",
        features + 0.0: "vispec_stage1_vloss",
        tokens + 0.1 * ranking: "vispec_stage1_ploss_with_rank",
    }.items():
        close(ours[None], data[stored], terms=terms)
