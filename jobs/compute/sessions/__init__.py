"""Sessions of Spark, and what executors on other machines get from this one."""
