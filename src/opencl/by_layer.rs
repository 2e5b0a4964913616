//! Items of consecutive layers, indexed by layer.

use std::ops::{Index, IndexMut, Range};

/// One item for each layer of a range.
pub struct ByLayer<T> {
    first: usize,
    items: Vec<T>,
}

impl<T> ByLayer<T> {
    /// Makes the item of each layer.
    pub fn try_new<E>(layers: Range<usize>, make: impl FnMut(usize) -> Result<T, E>) -> Result<Self, E> {
        Ok(Self { first: layers.start, items: layers.map(make).collect::<Result<_, E>>()? })
    }

    /// The layers.
    pub fn layer_range(&self) -> Range<usize> {
        self.first..self.first + self.items.len()
    }

    /// The items in the order of layers.
    pub fn values(&self) -> std::slice::Iter<'_, T> {
        self.items.iter()
    }

    /// Takes the items, in the order of layers.
    pub fn into_values(self) -> std::vec::IntoIter<T> {
        self.items.into_iter()
    }

    /// The item of a layer, if there is one.
    pub fn get(&self, layer: usize) -> Option<&T> {
        self.items.get(layer.checked_sub(self.first)?)
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }
}

impl<T> Index<usize> for ByLayer<T> {
    type Output = T;

    fn index(&self, layer: usize) -> &T {
        &self.items[layer - self.first]
    }
}

impl<T> IndexMut<usize> for ByLayer<T> {
    fn index_mut(&mut self, layer: usize) -> &mut T {
        &mut self.items[layer - self.first]
    }
}
