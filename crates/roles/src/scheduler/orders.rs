//! Loads and unloads of models that clients of frontends ask for.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::message::{Doing, NodeId};

/// The most orders that are under way at a time.
const MOST_ORDERS: usize = 256;

/// A client's wish, named by its frontend and by that frontend's number.
pub(super) type Wish = (NodeId, u64);

/// A message about an order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Word {
    /// To a backend: do this to the model.
    Do { backend: NodeId, order: u64, model: String, doing: Doing },
    /// To a frontend: the end of a wish.
    Done { wish: Wish, failed: Option<String> },
}

#[derive(Debug)]
struct Order {
    wish: Wish,
    /// Backends that have not answered.
    waits: BTreeSet<NodeId>,
    failed: Vec<String>,
}

/// The orders of a scheduler while it leads. At most 256 are under way. A frontend that loses this
/// leader ends its own wishes.
#[derive(Debug, Default)]
pub(super) struct Orders {
    next: u64,
    open: BTreeMap<u64, Order>,
    words: VecDeque<Word>,
}

impl Orders {
    /// Orders a change of a model on these backends.
    pub fn begin(&mut self, wish: Wish, (model, doing): (&str, Doing), backends: BTreeSet<NodeId>) {
        if backends.is_empty() {
            return self.refuse(wish, none_has(model, doing));
        }
        if self.open.len() >= MOST_ORDERS {
            let reason = format!("{MOST_ORDERS} models are being loaded or unloaded, the most at a time; try again");
            return self.refuse(wish, reason);
        }
        let order = self.next;
        self.next += 1;
        for backend in &backends {
            self.words.push_back(Word::Do { backend: *backend, order, model: model.to_owned(), doing });
        }
        self.open.insert(order, Order { wish, waits: backends, failed: Vec::new() });
    }

    /// Ends a wish at once.
    pub fn refuse(&mut self, wish: Wish, reason: String) {
        self.words.push_back(Word::Done { wish, failed: Some(reason) });
    }

    /// Takes the answer of a backend, whose `name` a failure tells.
    pub fn handle_done(&mut self, order: u64, (backend, name): (NodeId, &str), failed: Option<String>) {
        let Some(open) = self.open.get_mut(&order) else { return };
        if !open.waits.remove(&backend) {
            return;
        }
        open.failed.extend(failed.map(|reason| format!("{name}: {reason}")));
        if open.waits.is_empty()
            && let Some(Order { wish, failed, .. }) = self.open.remove(&order)
        {
            let failed = (!failed.is_empty()).then(|| failed.join("; "));
            self.words.push_back(Word::Done { wish, failed });
        }
    }

    /// Handles the loss of a peer.
    pub fn handle_lost(&mut self, node: NodeId, name: &str) {
        self.open.retain(|_, order| order.wish.0 != node);
        let waits = self.open.iter().filter(|(_, order)| order.waits.contains(&node));
        for order in waits.map(|(order, _)| *order).collect::<Vec<_>>() {
            self.handle_done(order, (node, name), Some("it was lost meanwhile".to_owned()));
        }
    }

    /// The next message to send.
    pub fn poll(&mut self) -> Option<Word> {
        self.words.pop_front()
    }
}

fn none_has(model: &str, doing: Doing) -> String {
    match doing {
        Doing::Load => format!(
            "no backend could load model '{model}': none has it in its repository, or their models are fixed; start \
             backends with --model-control-mode explicit"
        ),
        Doing::Unload => format!(
            "no backend could unload model '{model}': none has it, or their models are fixed; start backends with \
             --model-control-mode explicit"
        ),
    }
}
