python -m trainer processes=2 --config-dir lab/conf experiment=clothes loop.global_batch=80 loop.micro_batches=2
