python -m trainer strategy=dp model=torchvision model.name=resnet18 \
    data=cifar10 data.root=data data.augment.crop=0 data.augment.flip=false \
    optimizer=sgd optimizer.lr=0.01 optimizer.nesterov=false optimizer.weight_decay=5e-4 optimizer.decay=all \
    schedule=constant loop.global_batch=32 loop.epochs=1
