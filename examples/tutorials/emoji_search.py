# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Pictures searched by words: CLIP on emoji
#
# Can a model learn in half a minute, on one core and from 3,466 small pictures with their names, to find pictures it
# has never seen by words that nobody wrote under them? And where it fails, why?
#
# The data are emoji of two vendors, 64 pixels wide, with their names. The archive is looked for in the folder that the
# environment variable `SCENT_LIGHTNING_DATA` names, as `emoji/emoji.tar.gz`: a folder `images` and a table `emoji.tsv`
# with the columns `filepath`, `title`, `category` and `split`. Pictures of your own in such a table do as well. Needs
# `pip install "scent-lightning[vision]"`.
#
# *About 30 seconds on one core. Pictures are written to the folder that you run it in.*

# %%
import logging
import os
import re
import shutil
import warnings
from pathlib import Path

import lightning as L
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from scent_lightning.data import ImageTextDataModule
from scent_lightning.duals import SCENT
from scent_lightning.figures import new_figure, save
from scent_lightning.tasks import CLIPTask

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

# %%
shutil.unpack_archive(Path(os.environ["SCENT_LIGHTNING_DATA"]) / "emoji" / "emoji.tar.gz", "emoji")
table = pd.read_csv("emoji/emoji.tsv", sep="\t")
unseen = table[table["split"] == "val"].reset_index(drop=True)
print(f"{(table['split'] == 'train').sum():,} pictures to train on, {len(unseen)} of other emoji held out")
table.sample(5, random_state=0)[["title", "vendor", "category"]]

# %% [markdown]
# ## Words to numbers
#
# A large CLIP reads parts of words, 49,408 of them. Our names have under 2,000 different words, so we number those: the
# rows of the table of words are then few, and each is met often. The last number ends a caption; it has to be the
# highest.

# %%
LENGTH = 16
words = sorted({word for title in table["title"] for word in re.findall(r"\w+", title.lower())})
number = {word: position for position, word in enumerate(words, start=1)}


def tokens(captions: list[str]) -> Tensor:
    found = torch.zeros(len(captions), LENGTH, dtype=torch.long)
    for row, caption in enumerate(captions):
        known = [number[word] for word in re.findall(r"\w+", caption.lower()) if word in number]
        known = [*known[: LENGTH - 1], len(words) + 1]
        found[row, : len(known)] = torch.tensor(known)
    return found


print(len(words), "words;", "'red heart' is", tokens(["red heart"])[0, :4].tolist())

# %% [markdown]
# ## Two towers
#
# One tower makes a vector of a picture, the other of a text, and training pulls those of a pair together and pushes all
# others apart. A batch of 64 shows each picture only 63 other texts. What is far more is remembered: every picture and
# every text has a dual variable ν, the logarithm of how similar the wrong ones are.

# %%
data = ImageTextDataModule(
    "table",
    "emoji/emoji.tsv",
    split_column="split",
    image_size=32,
    augment=False,
    tokenizer=tokens,
    batch_size=64,
    in_memory=True,
)
data.setup("fit")
L.seed_everything(0, verbose=False)
task = CLIPTask(
    data.num_anchors,
    SCENT(),
    architecture={
        "embed_dim": 64,
        "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 64, "layers": 2, "head_width": 32},
        "text_cfg": {"context_length": LENGTH, "vocab_size": len(words) + 2, "width": 64, "heads": 2, "layers": 1},
    },
    lr=2e-3,
    tau_lr=1e-4,
    rho=8.0,
    warmup_steps=50,
)
trainer = L.Trainer(
    accelerator="cpu",
    max_epochs=6,
    limit_val_batches=0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(task, datamodule=data)

# %% [markdown]
# ## Searching
#
# The vectors of the pictures are made once. A search is one text's vector and a product.

# %%
task.eval()
with torch.no_grad():
    images = torch.cat([pixels for pixels, *_ in data.val_dataloader()])
    captions = unseen["title"].tolist()
    pictures, texts = task(images, tokens(captions))


def search(text: str, count: int) -> list[int]:
    with torch.no_grad():
        _, vector = task(images[:1], tokens([text]))
    return (pictures @ vector[0]).topk(count).indices.tolist()


queries = ["flag", "woman", "cat", "smiling face", "red circle", "food on a plate"]
figure, panels = new_figure(len(queries), 8, size=(0.9, 0.9))
for row, query in zip(panels, queries, strict=True):
    for panel, place in zip(row, search(query, 8), strict=True):
        panel.imshow(Image.open(Path("emoji") / unseen["filepath"][place]).convert("RGBA"))
        panel.axis("off")
    row[0].set_title(query, loc="left")
Image.open(save(figure, "emoji_search.png", vector=False))

# %% [markdown]
# None of these pictures was in training. "Flag" finds flags only. "Red circle" finds what is red, and "smiling face"
# finds faces: that none of them smiles is too fine for 32 pixels and half a minute. "Cat" finds nothing that resembles
# one, but much in the colour of a cat, and "food on a plate" likes the colour of crust. What was learned first is
# colour, and the outline of what there is most of.
#
# ## How often is it right?
#
# Each name has two right pictures among the 356, one of each vendor.

# %%
same = torch.tensor([[one == other for other in captions] for one in captions])
best = (texts @ pictures.T).topk(10, dim=1).indices
unseen["found"] = same.gather(1, best).any(dim=1).numpy()
chance = 1 - (1 - 2 / len(captions)) ** 10
print(f"right among the first ten: {100 * unseen['found'].mean():.0f} % of the names (by chance {100 * chance:.0f} %)")

trained = {
    word for title in table.loc[table["split"] == "train", "title"] for word in re.findall(r"\w+", title.lower())
}
unseen["words met"] = [set(re.findall(r"\w+", title.lower())) <= trained for title in captions]
print(
    (100 * unseen.groupby("words met")["found"].mean()).round().astype(int).to_dict(), "% by whether all words were met"
)

shares = (100 * unseen.groupby("category")["found"].mean()).sort_values()
figure, ((panel,),) = new_figure(size=(6.0, 3.4))
panel.barh(shares.index, shares)
panel.axvline(100 * chance, color="grey", linestyle=":")
panel.set(xlabel="names whose picture is among the first ten, % (dotted: by chance)")
Image.open(save(figure, "emoji_found.png", vector=False))

# %% [markdown]
# Seven times as often as by chance, and two reasons for what is missing. **Words:** of the names whose words were all
# met in training half are found, of the others a quarter. A word that is only in the names held out is a number that
# means nothing; a large CLIP reads parts of words, and has read more. **Likeness:** people, faces and symbols come in
# families that share a look and a name. Food and activities do not: there is one pretzel, and whoever has not seen it
# cannot know.
#
# ## The same without Python
#
# ```text
# scent-lightning fit --config clip_emoji --data.path emoji/emoji.tsv
# ```
#
# trains a larger model at 64 pixels for 30 epochs, with a panel of searches in TensorBoard. A few minutes.
#
# ## Try next
#
# * `max_epochs=30` and `image_size=64` (with `patch_size: 16`): which categories gain?
# * `BSGD()` for `SCENT()`: OpenCLIP's loss, in which the batch is all there is. On emoji hardly anything separates them
#   (`examples/README.md` has the table); why might that be, with five visits of a pair?
# * A table with a picture folder of your own.
