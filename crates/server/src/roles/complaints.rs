//! What is wrong with peers, said once each.

use std::collections::BTreeSet;

/// Most complaints that are remembered; what comes after them is not said.
const MOST: usize = 256;

/// What was said of peers. A peer that does the same wrong thing a thousand times is worth one line.
#[derive(Debug, Default)]
pub struct Complaints(BTreeSet<(String, String)>);

impl Complaints {
    /// Says that something is wrong with somebody, unless it was said before; whether it was said now.
    pub fn say(&mut self, who: &str, what: &str) -> bool {
        // Numbers differ from one time to the next.
        let kind: String = what.chars().filter(|c| !c.is_ascii_digit()).collect();
        let is_new = self.0.len() < MOST && self.0.insert((who.to_owned(), kind));
        if is_new {
            tracing::warn!(peer = who, "{what}; this is said once");
        }
        is_new
    }
}
