//! Several texts looked for at once, byte by byte: each byte takes the same time, however many they are (Aho and
//! Corasick, 1975). It also knows how much of a text could still become one, which is why it is written here.

use std::collections::VecDeque;

/// The node of no text.
const ROOT: u32 = 0;

/// A beginning of some of the texts.
#[derive(Debug, Clone, Default)]
struct Node {
    /// Its last byte.
    byte: u8,
    /// Bytes that it has.
    depth: u32,
    /// Its longest end that is a beginning too.
    fail: u32,
    /// Nodes with a byte more: the first, and the next one of the same parent; 0 is none.
    child: u32,
    sibling: u32,
    /// The longest text that ends here: its length and number.
    found: Option<(u32, u32)>,
}

/// The state of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct MatchState(u32);

/// Finds all of some texts in one pass.
#[derive(Debug, Clone)]
pub(crate) struct Automaton {
    nodes: Vec<Node>,
}

impl Automaton {
    /// For texts that are not empty. Of two that are the same, the first is found.
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut all = Self { nodes: vec![Node::default()] };
        for (number, text) in texts.into_iter().enumerate() {
            let end = text
                .iter()
                .fold(ROOT, |node, &byte| all.child(node, byte).unwrap_or_else(|| all.add(node, byte)));
            all.nodes[end as usize].found.get_or_insert((text.len() as u32, number as u32));
        }
        all.connect();
        all
    }

    /// True if nothing is looked for.
    pub fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }

    fn add(&mut self, parent: u32, byte: u8) -> u32 {
        let new = self.nodes.len() as u32;
        let Node { depth, child, .. } = self.nodes[parent as usize];
        self.nodes.push(Node { byte, depth: depth + 1, sibling: child, ..Node::default() });
        self.nodes[parent as usize].child = new;
        new
    }

    fn children(&self, node: u32) -> impl Iterator<Item = u32> {
        let first = self.nodes[node as usize].child;
        let next = |&node: &u32| Some(self.nodes[node as usize].sibling).filter(|&next| next != ROOT);
        std::iter::successors(Some(first).filter(|&first| first != ROOT), next)
    }

    fn child(&self, node: u32, byte: u8) -> Option<u32> {
        self.children(node).find(|&child| self.nodes[child as usize].byte == byte)
    }

    /// Shorter nodes come first, so what a node falls back to is ready.
    fn connect(&mut self) {
        let mut open: VecDeque<u32> = self.children(ROOT).collect();
        while let Some(node) = open.pop_front() {
            for child in self.children(node).collect::<Vec<_>>() {
                let fail = self.step(self.nodes[node as usize].fail, self.nodes[child as usize].byte);
                let found = self.nodes[fail as usize].found;
                let of = &mut self.nodes[child as usize];
                (of.fail, of.found) = (fail, of.found.or(found));
                open.push_back(child);
            }
        }
    }

    fn step(&self, mut node: u32, byte: u8) -> u32 {
        loop {
            match self.child(node, byte) {
                Some(child) => return child,
                None if node == ROOT => return ROOT,
                None => node = self.nodes[node as usize].fail,
            }
        }
    }

    /// The state behind another byte.
    pub fn next(&self, MatchState(node): MatchState, byte: u8) -> MatchState {
        MatchState(self.step(node, byte))
    }

    /// Bytes before a state that could still become a text that is looked for.
    pub fn open(&self, MatchState(node): MatchState) -> usize {
        self.nodes[node as usize].depth as usize
    }

    /// The length and number of the longest text that ends in a state.
    pub fn longest_match(&self, MatchState(node): MatchState) -> Option<(usize, usize)> {
        self.nodes[node as usize].found.map(|(length, number)| (length as usize, number as usize))
    }

    /// True if one of the texts is in these bytes.
    pub fn is_in(&self, bytes: &[u8]) -> bool {
        let mut state = MatchState::default();
        bytes.iter().any(|&byte| {
            state = self.next(state, byte);
            self.longest_match(state).is_some()
        })
    }
}
