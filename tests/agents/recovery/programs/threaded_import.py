"""A module that starts a thread when it is imported, as some native libraries do."""

import threading
import time

threading.Thread(target=lambda: time.sleep(600), daemon=True).start()
