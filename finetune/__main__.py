"""``python -m finetune`` does what ``finetune`` does."""

from finetune.cli.main import main

if __name__ == "__main__":
    main()
