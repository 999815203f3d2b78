"""``python -m scent_lightning`` is the ``scent-lightning`` command."""

from scent_lightning.cli import main

if __name__ == "__main__":
    main()
