"""The job `doctor`: are the machines, the network and the folder that a run will use all right?"""
