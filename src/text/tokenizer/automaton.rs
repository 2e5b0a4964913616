//! Searches for several texts at once, byte by byte, in a time that does not depend on their number (Aho and Corasick,
//! 1975). Written here because it also has to know how many bytes could still become a match.

use std::collections::VecDeque;

/// The node of the empty prefix.
const ROOT: u32 = 0;

/// A prefix of some of the texts.
#[derive(Debug, Clone, Default)]
struct Node {
    /// The last byte of the prefix.
    byte: u8,
    /// The length of the prefix in bytes.
    depth: u32,
    /// The node of its longest proper suffix that is a prefix too.
    fail: u32,
    /// The first node with one more byte, and the next node of the same parent; 0 is none.
    child: u32,
    sibling: u32,
    /// The length and number of the longest text that ends here.
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
    /// An automaton for texts that are not empty. Of equal texts, the first is found.
    pub fn new<'a>(texts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut all = Self { nodes: vec![Node::default()] };
        for (number, text) in texts.into_iter().enumerate() {
            let end = text.iter().fold(ROOT, |node, &byte| {
                all.find_child(node, byte).unwrap_or_else(|| all.add_node(node, byte))
            });
            all.nodes[end as usize].found.get_or_insert((text.len() as u32, number as u32));
        }
        all.set_fail_links();
        all
    }

    /// True if there are no texts.
    pub fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }

    fn add_node(&mut self, parent: u32, byte: u8) -> u32 {
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

    fn find_child(&self, node: u32, byte: u8) -> Option<u32> {
        self.children(node).find(|&child| self.nodes[child as usize].byte == byte)
    }

    /// Sets the fail links. Shorter prefixes come first, so the node to fall back to is ready.
    fn set_fail_links(&mut self) {
        let mut open: VecDeque<u32> = self.children(ROOT).collect();
        while let Some(node) = open.pop_front() {
            for child in self.children(node).collect::<Vec<_>>() {
                let fail = self.next_node(self.nodes[node as usize].fail, self.nodes[child as usize].byte);
                let found = self.nodes[fail as usize].found;
                let of = &mut self.nodes[child as usize];
                (of.fail, of.found) = (fail, of.found.or(found));
                open.push_back(child);
            }
        }
    }

    fn next_node(&self, mut node: u32, byte: u8) -> u32 {
        loop {
            match self.find_child(node, byte) {
                Some(child) => return child,
                None if node == ROOT => return ROOT,
                None => node = self.nodes[node as usize].fail,
            }
        }
    }

    /// The state after another byte.
    pub fn next_state(&self, MatchState(node): MatchState, byte: u8) -> MatchState {
        MatchState(self.next_node(node, byte))
    }

    /// The number of last bytes that could still become a match.
    pub fn open_bytes(&self, MatchState(node): MatchState) -> usize {
        self.nodes[node as usize].depth as usize
    }

    /// The length and number of the longest text that ends at a state.
    pub fn longest_match(&self, MatchState(node): MatchState) -> Option<(usize, usize)> {
        self.nodes[node as usize].found.map(|(length, number)| (length as usize, number as usize))
    }

    /// True if one of the texts is in these bytes.
    pub fn has_match(&self, bytes: &[u8]) -> bool {
        let mut state = MatchState::default();
        bytes.iter().any(|&byte| {
            state = self.next_state(state, byte);
            self.longest_match(state).is_some()
        })
    }
}
