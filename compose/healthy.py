"""Exit with 0 if Airflow's health page calls the given part healthy; as in tidegate/stack/components/airflow.py.

    python healthy.py metadatabase|scheduler|dag_processor|triggerer

Standard library only: it runs every ten seconds in four containers.
"""

import json
import os
import sys
import urllib.request

part = sys.argv[1]
with urllib.request.urlopen(f"{os.environ['TIDEGATE_AIRFLOW_URL']}/api/v2/monitor/health", timeout=5) as answer:  # noqa: S310
    status = (json.load(answer).get(part) or {}).get("status")
if status != "healthy":
    sys.exit(f"Airflow's health page says that {part} is {status}")
