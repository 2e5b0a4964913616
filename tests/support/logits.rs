//! Logits of a session over a text.

use antigravity::session::Session;

/// Logits after each token of `ids`, the last `more` of which are decoded one by one.
pub fn collect_logits(session: &mut Session, ids: &[u32], more: usize) -> Vec<f32> {
    let (prompt, rest) = ids.split_at(ids.len() - more);
    let mut all = Vec::new();
    session.logits_of_all(prompt, |_, row| all.extend_from_slice(row)).unwrap();
    for &id in rest {
        session.decode(id).unwrap();
        all.extend_from_slice(session.logits());
    }
    all
}

/// Their bits, for comparisons in which zeros of either sign differ.
pub fn collect_logit_bits(session: &mut Session, ids: &[u32], more: usize) -> Vec<u32> {
    collect_logits(session, ids, more).iter().map(|x| x.to_bits()).collect()
}
