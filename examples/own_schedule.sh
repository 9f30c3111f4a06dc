# A schedule of your own, written by hand: check it, break it, repair it, predict it.
# Two ranks, three microbatches; each row is a rank, in the format that PyTorch reads.

cat > mine.csv <<CSV
0F0,0F1,0B0,0F2,0B1,0B2
1F0,1B0,1F1,1B1,1F2,1B2
CSV
fullbore check mine.csv

echo
echo "the same with the backward of microbatch 1 before its forward on rank 1:"
sed 's/1F1,1B1/1B1,1F1/' mine.csv > broken.csv
fullbore check broken.csv
echo "exit status $?"

echo
fullbore simulate mine.csv --backward-s 2 --hop-s 0.1
