"""A training script without a main function: runs on import as __main__ only."""

import sys

if __name__ == "__main__":
    print(f"plain script ran with {sys.argv[1:]}")
    sys.exit(int(sys.argv[1]))
