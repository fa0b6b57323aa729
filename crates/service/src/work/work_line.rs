//! The order in which the work of clients gets its turns: a tree of groups, addresses and
//! connections.
//!
//! Example: sixteen connections have 48 MB of JSON each, and one has 300 kB. The two sizes are two
//! groups, so the small body gets every second turn. The other turns go to the first large bodies,
//! until they are read.
//!
//! **Rule.** At each level of the tree, the branch whose turns took the least time goes first.
//! Among equal branches the oldest goes first. A new branch starts with the least time of its
//! siblings. A branch without work is forgotten.
//!
//! **Order in a connection.** Work that has begun goes before new work. Then the earliest deadline
//! goes first, and equal deadlines go in the order of arrival.
//!
//! **Quotas.** A connection, and a group of one size, may have a limited amount of begun work. An
//! address or a model with overdue turns begins nothing more until some of these end.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use downbeat_core::Time;

use crate::client::Client;

/// Most work of the smallest size that is begun at the same time, and half as much of each size
/// above. Work that has begun holds a thread and memory while others have their turns.
const MOST_BEGUN_OF_SMALLEST: u32 = 32;
/// Overdue turns of a model at which it begins no more work.
const MOST_OVERDUE_OF_MODEL: u32 = 2;
/// The same bound for an address.
const MOST_OVERDUE_OF_ADDRESS: u32 = 4;

/// A branch of the tree.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Branch {
    /// Work on about as many bytes: the logarithm of their number.
    Size(u8),
    /// Work for a model: the number of its steps.
    Model(u64),
    /// All connections of an address; `None`: this process.
    Address(Option<IpAddr>),
    /// A connection.
    Connection(u64),
}

/// The way from the root of the tree to a connection.
pub type Path = [Branch; 3];

/// The path of a client's work on `bytes` bytes. Sizes within a factor of four are one group.
pub fn path_by_size(client: Client, bytes: u64) -> Path {
    let bits = u64::BITS - (bytes >> 17).leading_zeros();
    path(Branch::Size(u8::try_from(bits / 2).unwrap_or(u8::MAX)), client)
}

/// The path of a client's work for a model.
pub fn path_by_model(client: Client, model: u64) -> Path {
    path(Branch::Model(model), client)
}

fn path(group: Branch, client: Client) -> Path {
    [group, Branch::Address(client.address()), Branch::Connection(client.connection())]
}

/// Work that waits for its turn.
#[derive(Debug)]
pub struct Waiting<T> {
    /// The path of its connection in the tree.
    pub path: Path,
    /// Whether it has had a turn already.
    pub has_begun: bool,
    /// When it should be done.
    pub deadline: Time,
    /// The work's number, in the order of arrival.
    pub number: u64,
    /// The work.
    pub work: T,
}

/// The work of all clients that waits for its turn.
#[derive(Debug)]
pub struct WorkLine<T> {
    root: Node<T>,
    /// Most work of a connection that is begun at the same time.
    quota: u32,
}

#[derive(Debug)]
struct Node<T> {
    /// Time that the turns of the branch took.
    served: Duration,
    /// The number of the first work in the branch.
    came: u64,
    /// Work that has had a turn and has not ended.
    begun: u32,
    /// Turns that are overdue.
    overdue: u32,
    children: BTreeMap<Branch, Node<T>>,
    /// The waiting work of a connection.
    waiting: BTreeMap<Rank, Waiting<T>>,
}

/// The place of work in its connection: whether it is new, its deadline, its number.
type Rank = (bool, Time, u64);

impl<T> WorkLine<T> {
    /// An empty line, in which a connection may have begun `quota` pieces of work at the same time.
    pub fn new(quota: u32) -> Self {
        WorkLine { root: Node::new(Duration::ZERO, 0), quota }
    }

    /// Puts work in the line.
    pub fn push(&mut self, waiting: Waiting<T>) {
        let mut node = &mut self.root;
        for branch in waiting.path {
            let least = node.children.values().map(|child| child.served).min().unwrap_or_default();
            node = node.children.entry(branch).or_insert_with(|| Node::new(least, waiting.number));
        }
        node.waiting.insert((!waiting.has_begun, waiting.deadline, waiting.number), waiting);
    }

    /// Takes the work that has the next turn out of the line. From now on it has begun.
    pub fn pop(&mut self) -> Option<Waiting<T>> {
        self.root.pop(self.quota, true)
    }

    /// Counts the time of a turn. A turn that took no time counts too, so that work without steps
    /// does not stay first.
    pub fn serve(&mut self, path: &Path, took: Duration) {
        let took = took.max(Duration::from_nanos(1));
        self.each(path, |node| node.served = node.served.saturating_add(took));
    }

    /// Counts a turn of a connection as overdue, or no longer.
    pub fn set_overdue(&mut self, path: &Path, overdue: bool) {
        self.each(path, |node| match overdue {
            true => node.overdue += 1,
            false => node.overdue = node.overdue.saturating_sub(1),
        });
    }

    /// Counts the end of work that had begun.
    pub fn end(&mut self, path: &Path) {
        self.each(path, |node| node.begun = node.begun.saturating_sub(1));
        self.root.forget(path);
    }

    /// All waiting work, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &Waiting<T>> {
        let groups = self.root.children.values();
        let connections =
            groups.flat_map(|group| group.children.values()).flat_map(|address| address.children.values());
        connections.flat_map(|connection| connection.waiting.values())
    }

    fn each(&mut self, path: &Path, mut change: impl FnMut(&mut Node<T>)) {
        let mut node = &mut self.root;
        for branch in path {
            let Some(child) = node.children.get_mut(branch) else { return };
            change(child);
            node = child;
        }
    }
}

impl<T> Node<T> {
    fn new(served: Duration, came: u64) -> Self {
        Node { served, came, begun: 0, overdue: 0, children: BTreeMap::new(), waiting: BTreeMap::new() }
    }

    /// Whether the node, at this branch, may begin work.
    fn may_begin(&self, branch: Branch, quota: u32) -> bool {
        match branch {
            Branch::Size(size) => self.begun < (MOST_BEGUN_OF_SMALLEST >> size.min(31)).max(quota),
            Branch::Model(_) => self.overdue < MOST_OVERDUE_OF_MODEL,
            Branch::Address(_) => self.overdue < MOST_OVERDUE_OF_ADDRESS,
            Branch::Connection(_) => self.begun < quota,
        }
    }

    /// Whether something in it can have a turn. `begins`: its parents may begin work.
    fn can_go(&self, quota: u32, begins: bool) -> bool {
        let first = self.waiting.first_key_value();
        first.is_some_and(|((is_new, ..), _)| begins || !is_new)
            || self
                .children
                .iter()
                .any(|(branch, child)| child.can_go(quota, begins && child.may_begin(*branch, quota)))
    }

    fn pop(&mut self, quota: u32, begins: bool) -> Option<Waiting<T>> {
        let waiting = match self.waiting.first_entry() {
            Some(first) if begins || first.get().has_begun => first.remove(),
            Some(_) => return None,
            None => {
                let candidates = self.children.iter_mut().filter_map(|(branch, child)| {
                    let begins = begins && child.may_begin(*branch, quota);
                    child.can_go(quota, begins).then_some((child, begins))
                });
                let (child, begins) = candidates.min_by_key(|(child, _)| (child.served, child.came))?;
                child.pop(quota, begins)?
            }
        };
        self.begun += u32::from(!waiting.has_begun);
        Some(waiting)
    }

    /// Forgets branches without work on this path.
    fn forget(&mut self, path: &[Branch]) {
        let Some((branch, rest)) = path.split_first() else { return };
        let Some(child) = self.children.get_mut(branch) else { return };
        child.forget(rest);
        if child.begun == 0 && child.children.is_empty() && child.waiting.is_empty() {
            self.children.remove(branch);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn client(address: u8) -> Client {
        Client::at(IpAddr::from([10, 0, 0, address]))
    }

    fn waiting(path: Path, number: u64) -> Waiting<u64> {
        Waiting { path, has_begun: false, deadline: Time::MAX, number, work: 0 }
    }

    /// The numbers of the next `turns` turns. Each one takes a nanosecond, and goes on with its
    /// work after that.
    fn turns(line: &mut WorkLine<u64>, turns: usize) -> Vec<u64> {
        let turn = |_| {
            let next = line.pop()?;
            line.serve(&next.path, Duration::from_nanos(1));
            let number = next.number;
            line.push(Waiting { has_begun: true, ..next });
            Some(number)
        };
        (0..turns).map_while(turn).collect()
    }

    #[test]
    fn a_small_body_has_every_second_turn_beside_sixteen_large_ones() {
        let mut line = WorkLine::new(2);
        for number in 0..16 {
            line.push(waiting(path_by_size(client(1), 48 << 20), number));
        }
        line.push(waiting(path_by_size(client(1), 300 << 10), 99));
        let order = turns(&mut line, 64);
        let count = |wanted: u64| order.iter().filter(|number| **number == wanted).count();
        // No more of the large ones are begun than the quota of a connection allows.
        assert_eq!((count(99), count(0), count(1)), (32, 16, 16), "{order:?}");
    }

    #[test]
    fn an_address_with_many_connections_has_the_share_of_one_address() {
        let mut line = WorkLine::new(2);
        for number in 0..10 {
            line.push(waiting(path_by_size(client(1), 300 << 10), number));
        }
        line.push(waiting(path_by_size(client(2), 300 << 10), 99));
        let order = turns(&mut line, 20);
        assert_eq!(order.iter().filter(|number| **number == 99).count(), 10, "{order:?}");
    }

    #[test]
    fn a_client_that_comes_late_does_not_make_up_for_the_time_before() {
        let mut line = WorkLine::new(2);
        line.push(waiting(path_by_size(client(1), 1 << 20), 1));
        assert_eq!(turns(&mut line, 100), [1; 100]);
        line.push(waiting(path_by_size(client(2), 1 << 20), 2));
        let order = turns(&mut line, 10);
        assert_eq!(order.iter().filter(|number| **number == 2).count(), 5, "{order:?}");
    }

    #[test]
    fn a_connection_begins_no_more_than_its_quota() {
        let mut line = WorkLine::new(2);
        let path = path_by_size(client(1), 1 << 20);
        (0..3).for_each(|number| line.push(waiting(path, number)));
        assert_eq!([line.pop(), line.pop()].map(|next| next.unwrap().number), [0, 1]);
        assert!(line.pop().is_none());
        line.end(&path);
        assert_eq!(line.pop().unwrap().number, 2);
    }

    #[test]
    fn a_model_with_overdue_turns_begins_nothing_and_others_do() {
        let mut line = WorkLine::new(8);
        let (slow, quick) = (path_by_model(client(1), 1), path_by_model(client(1), 2));
        (0..4).for_each(|number| line.push(waiting(slow, number)));
        for _ in 0..2 {
            assert_eq!(line.pop().unwrap().path, slow);
            line.set_overdue(&slow, true);
        }
        assert!(line.pop().is_none());
        line.push(waiting(quick, 9));
        assert_eq!(line.pop().unwrap().number, 9);
        line.set_overdue(&slow, false);
        assert_eq!(line.pop().unwrap().number, 2);
    }

    #[test]
    fn work_without_steps_is_no_more_urgent_than_other_work() {
        let mut line = WorkLine::new(2);
        let (listing, reading) = (path_by_size(client(1), 0), path_by_size(client(2), 300 << 10));
        let mut order = Vec::new();
        for number in 0..20 {
            line.push(waiting(listing, 2 * number));
            line.push(waiting(reading, 2 * number + 1));
            let next = line.pop().unwrap();
            line.serve(&next.path, Duration::from_millis(1));
            line.end(&next.path);
            order.push(next.number % 2);
        }
        assert_eq!(order.iter().sum::<u64>(), 10, "{order:?}");
    }

    #[test]
    fn a_line_without_work_holds_nothing() {
        let mut line = WorkLine::new(2);
        let path = path_by_size(client(1), 5);
        line.push(waiting(path, 1));
        line.pop().unwrap();
        line.end(&path);
        assert!(line.root.children.is_empty());
    }

    proptest! {
        /// Work of any size in any order all gets turns. Two connections that both wait all the
        /// time differ by one slice at most.
        #[test]
        fn connections_that_wait_are_served_alike(addresses in vec(0_u8..3, 1..12), size in 0_u64..1 << 19) {
            let mut line = WorkLine::new(2);
            for (number, address) in addresses.iter().enumerate() {
                line.push(waiting(path_by_size(client(*address), size), number as u64));
            }
            let order = turns(&mut line, 24 * addresses.len());
            prop_assert_eq!(order.len(), 24 * addresses.len());
            let count = |number: usize| order.iter().filter(|other| **other == number as u64).count();
            for (one, its) in addresses.iter().enumerate() {
                for (other, _) in addresses.iter().enumerate().filter(|(_, address)| *address == its) {
                    prop_assert!(count(one).abs_diff(count(other)) <= 1, "{:?}", order);
                }
            }
        }
    }
}
