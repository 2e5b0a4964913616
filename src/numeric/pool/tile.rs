//! Splits matrices into tiles, one per task of a step.

use super::Pool;
use std::marker::PhantomData;
use std::ops::Range;

/// Row pointers of a matrix that is not contiguous. Callers reuse it, so that no step allocates.
#[derive(Default)]
pub struct RowTable<T>(Vec<SendPtr<T>>);

impl Pool {
    /// Splits `buf`, a matrix of rows of `row_len` elements, into column tiles `tile` wide and passes each to `job`.
    pub fn run_columns<T: Send>(
        &self,
        buf: &mut [T],
        row_len: usize,
        tile: usize,
        job: impl Fn(Tile<'_, T>) + Sync,
    ) {
        self.run_tiles(buf, row_len, (usize::MAX, tile), job);
    }

    /// Splits `buf`, a matrix of rows of `row_len` elements, into tiles of `rows` x `cols` and passes each to `job`.
    pub fn run_tiles<T: Send>(
        &self,
        buf: &mut [T],
        row_len: usize,
        (rows, cols): (usize, usize),
        job: impl Fn(Tile<'_, T>) + Sync,
    ) {
        assert!(row_len > 0 && buf.len().is_multiple_of(row_len) && rows > 0 && cols > 0);
        let all_rows = buf.len() / row_len;
        let (down, across) = (all_rows.div_ceil(rows), row_len.div_ceil(cols));
        let base = SendPtr(buf.as_mut_ptr());
        self.run(down * across, &|task| {
            let base = &base;
            let (row, col) = (task / across * rows, task % across * cols);
            job(Tile {
                base: base.0,
                table: &[],
                row_len,
                row,
                rows: rows.min(all_rows - row),
                col,
                cols: cols.min(row_len - col),
                buf: PhantomData,
            });
        });
    }

    /// Splits some ranges of rows of `buf`, a matrix of rows of `row_len` elements, into column tiles `tile` wide and
    /// passes each to `job`, with the index of its range.
    ///
    /// # Panics
    ///
    /// The ranges are not in ascending order, or not in the matrix.
    pub fn run_row_ranges<T: Send>(
        &self,
        buf: &mut [T],
        (row_len, tile): (usize, usize),
        ranges: &[Range<usize>],
        job: impl Fn(usize, Tile<'_, T>) + Sync,
    ) {
        assert!(row_len > 0 && buf.len().is_multiple_of(row_len) && tile > 0);
        let ends = [0].into_iter().chain(ranges.iter().map(|rows| rows.end));
        assert!(ranges.iter().zip(ends).all(|(rows, end)| end <= rows.start && rows.start <= rows.end));
        assert!(ranges.last().is_none_or(|rows| rows.end <= buf.len() / row_len));
        let (across, base) = (row_len.div_ceil(tile), SendPtr(buf.as_mut_ptr()));
        self.run(ranges.len() * across, &|task| {
            let base = &base;
            let (range, col) = (task / across, task % across * tile);
            let (row, rows) = (ranges[range].start, ranges[range].len());
            let cols = tile.min(row_len - col);
            job(range, Tile { base: base.0, table: &[], row_len, row, rows, col, cols, buf: PhantomData });
        });
    }

    /// Like [`Pool::run_columns`], for a matrix whose `rows` of `row_len` elements each lie anywhere in memory.
    ///
    /// # Panics
    ///
    /// A row has another length.
    pub fn run_scattered_columns<'a, T: Send + 'a>(
        &self,
        table: &mut RowTable<T>,
        rows: impl Iterator<Item = &'a mut [T]>,
        (row_len, tile): (usize, usize),
        job: impl Fn(Tile<'_, T>) + Sync,
    ) {
        table.0.clear();
        table.0.extend(rows.map(|row| {
            assert_eq!(row.len(), row_len);
            SendPtr(row.as_mut_ptr())
        }));
        let table = &table.0[..];
        self.run(row_len.div_ceil(tile), &|task| {
            let col = task * tile;
            let (rows, cols) = (table.len(), tile.min(row_len - col));
            let base = std::ptr::null_mut();
            job(Tile { base, table, row_len, row: 0, rows, col, cols, buf: PhantomData });
        });
    }
}

/// A pointer shared by tasks that write to disjoint tiles.
struct SendPtr<T>(*mut T);
// SAFETY: each task touches its own tile only, and elements may be sent between threads (`T: Send`).
unsafe impl<T: Send> Sync for SendPtr<T> {}
// SAFETY: as above; a table is only followed while the rows it was made of are borrowed.
unsafe impl<T: Send> Send for SendPtr<T> {}

/// A rectangle of a row-major buffer that one task owns.
pub struct Tile<'a, T> {
    base: *mut T,
    /// Start of each row; empty if the rows are contiguous from `base` on.
    table: &'a [SendPtr<T>],
    row_len: usize,
    /// First row.
    pub row: usize,
    pub rows: usize,
    /// First column.
    pub col: usize,
    pub cols: usize,
    buf: PhantomData<&'a mut [T]>,
}

impl<T> Tile<'_, T> {
    /// The part of row `row + r` that lies in this tile.
    pub fn row_mut(&mut self, r: usize) -> &mut [T] {
        assert!(r < self.rows);
        let row = self.row + r;
        // SAFETY: rows and columns are inside the buffer (or the rows of the table), tiles do not overlap, and
        // `&mut self` prevents borrowing two rows of one tile at once.
        unsafe {
            let row = match self.table.get(row) {
                Some(row) => row.0,
                None => self.base.add(row * self.row_len),
            };
            std::slice::from_raw_parts_mut(row.add(self.col), self.cols)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_and_every_tile_is_disjoint() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads);
            for (rows, row_len, tile) in
                [(1, 1, (1, 1)), (5, 7, (2, 3)), (1, 1000, (1, 16)), (33, 64, (100, 32))]
            {
                for _ in 0..200 {
                    let mut buf = vec![0u32; rows * row_len];
                    pool.run_tiles(&mut buf, row_len, tile, |mut t| {
                        for r in 0..t.rows {
                            let row = t.row + r;
                            let col = t.col;
                            for (c, x) in t.row_mut(r).iter_mut().enumerate() {
                                *x += (row * row_len + col + c) as u32 + 1;
                            }
                        }
                    });
                    assert!(buf.iter().enumerate().all(|(i, &x)| x == i as u32 + 1));
                }
            }
        }
    }

    #[test]
    fn ranges_of_rows_are_each_split_into_columns() {
        let (pool, mut buf) = (Pool::new(3), vec![0u32; 9 * 50]);
        let ranges = [0..2, 2..3, 5..9];
        pool.run_row_ranges(&mut buf, (50, 16), &ranges, |range, mut t| {
            for r in 0..t.rows {
                let (row, col) = (t.row + r, t.col);
                let add = |(c, x): (usize, &mut u32)| *x += (1000 * (range + 1) + 50 * row + col + c) as u32;
                t.row_mut(r).iter_mut().enumerate().for_each(add);
            }
        });
        let expected = |i: usize| {
            let range = ranges.iter().position(|rows| rows.contains(&(i / 50)));
            range.map_or(0, |range| 1000 * (range + 1) + i) as u32
        };
        assert!(buf.iter().enumerate().all(|(i, x)| *x == expected(i)));
    }

    #[test]
    fn scattered_rows_are_each_written_once() {
        let pool = Pool::new(3);
        let mut table = RowTable::default();
        let (mut first, mut second, mut third) = ([0u32; 50], [0u32; 50], [0u32; 50]);
        let rows = [&mut third[..], &mut first, &mut second].into_iter();
        pool.run_scattered_columns(&mut table, rows, (50, 16), |mut t| {
            for r in 0..t.rows {
                let col = t.col;
                t.row_mut(r).iter_mut().enumerate().for_each(|(c, x)| *x += (100 * r + col + c) as u32);
            }
        });
        let expected = |r: usize| std::array::from_fn(|c| (100 * r + c) as u32);
        assert_eq!([third, first, second], [expected(0), expected(1), expected(2)]);
    }
}
