//! Chooses the runs of a session that become CUDA graphs: runs whose input shapes come often. The
//! number of graphs is limited.
//!
//! Trying a graph costs about a dozen runs, during which the lane does nothing else, and each graph
//! takes memory of the device. A shape is therefore tried only when it comes again, and the outcome
//! is remembered. If there is no room, the graph that was not launched for the longest time goes.
//!
//! If more shapes alternate than there is room for, trials would never end. The table counts how
//! often a shape comes before its trial. Each time that an outcome is forgotten before it paid for
//! its trial, the required count doubles.

use std::collections::BTreeMap;

/// The most graphs of a session.
const MOST_GRAPHS: usize = 64;
/// The most nodes of all graphs of a session. The driver takes memory for each, some KiB to some
/// tens of KiB (not measured here): BERT-base has about 300.
const MOST_NODES: usize = 1 << 14;
/// The most shapes in the table.
const MOST_SHAPES: usize = 256;
/// The number of times that a shape must come before a trial, at first. The first run has taken the
/// memory that it needs.
const FIRST_NEEDED: u64 = 2;
/// The upper limit of that number.
const MOST_NEEDED: u64 = 1 << 20;
/// The number of runs after which a trial has paid for itself.
const WORTH_TRIAL: u64 = 100;

/// The sizes of some tensors, in sequence. The number of a tensor's axes comes before its sizes.
pub(super) type Shapes = [usize];

/// The outcomes for the runs of a session, by the shapes of their inputs. `G`: a graph.
pub(super) struct GraphTable<G> {
    most_graphs: usize,
    entries: BTreeMap<Vec<usize>, ShapeEntry<G>>,
    /// Runs so far.
    runs: u64,
    /// The number of times that a shape must come before it is tried.
    needed: u64,
}

struct ShapeEntry<G> {
    /// The number of times that the shape came since it was first seen, or since its trial.
    count: u64,
    /// The number of the last run with this shape.
    last: u64,
    standing: Standing<G>,
}

enum Standing<G> {
    /// Not yet tried.
    New,
    Graph {
        graph: G,
        nodes: usize,
    },
    /// Tried: it must run without a graph.
    Plain,
}

/// The way to make a run.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum How<'a, G> {
    Graph(&'a mut G),
    /// Without a graph, and then a graph must be tried.
    Try,
    Plain,
}

impl<G> GraphTable<G> {
    /// An empty table with room for this many graphs, or for [`MOST_GRAPHS`] if that is less.
    pub(super) fn new(most_graphs: usize) -> Self {
        let most_graphs = most_graphs.min(MOST_GRAPHS);
        GraphTable { most_graphs, entries: BTreeMap::new(), runs: 0, needed: FIRST_NEEDED }
    }

    /// Whether the table has a graph.
    pub(super) fn has_graphs(&self) -> bool {
        self.graphs().next().is_some()
    }

    fn graphs(&self) -> impl Iterator<Item = (&Vec<usize>, &ShapeEntry<G>, usize)> {
        self.entries.iter().filter_map(|(shapes, entry)| match entry.standing {
            Standing::Graph { nodes, .. } => Some((shapes, entry, nodes)),
            Standing::New | Standing::Plain => None,
        })
    }

    /// Chooses the way of the next run, with these shapes. Also returns the other shapes that the
    /// table forgets.
    pub(super) fn next(&mut self, shapes: &Shapes) -> (How<'_, G>, Option<Vec<usize>>) {
        self.runs += 1;
        let forgotten = if self.entries.contains_key(shapes) { None } else { self.enter(shapes) };
        let needed = self.needed;
        let Some(entry) = self.entries.get_mut(shapes) else { return (How::Plain, forgotten) };
        (entry.count, entry.last) = (entry.count + 1, self.runs);
        let how = match &mut entry.standing {
            Standing::New if entry.count >= needed => How::Try,
            Standing::New | Standing::Plain => How::Plain,
            Standing::Graph { graph, .. } => How::Graph(graph),
        };
        (how, forgotten)
    }

    /// Makes an entry for new shapes. A full table forgets the shapes without a graph that have not
    /// come for longest, and returns them.
    fn enter(&mut self, shapes: &Shapes) -> Option<Vec<usize>> {
        let mut forgotten = None;
        if self.entries.len() >= MOST_SHAPES {
            let others = self.entries.iter().filter(|(_, entry)| !matches!(entry.standing, Standing::Graph { .. }));
            forgotten = others.min_by_key(|(_, entry)| entry.last).map(|(shapes, _)| shapes.clone());
            let entry = forgotten.as_ref().and_then(|shapes| self.entries.remove(shapes));
            if let Some(ShapeEntry { count, standing: Standing::Plain, .. }) = entry {
                self.forget_trial(count);
            }
        }
        self.entries.insert(shapes.to_vec(), ShapeEntry { count: 0, last: self.runs, standing: Standing::New });
        forgotten
    }

    /// Notes that the outcome of a trial is forgotten, after this many runs.
    fn forget_trial(&mut self, runs: u64) {
        if runs < WORTH_TRIAL {
            self.needed = (self.needed * 2).min(MOST_NEEDED);
        }
    }

    /// Keeps the graph of a trial. Returns the graphs that must go in exchange, with their shapes.
    /// Drop them when none of them runs.
    pub(super) fn keep(&mut self, shapes: &Shapes, graph: G, nodes: usize) -> Vec<(Vec<usize>, G)> {
        let mut gone = Vec::new();
        while self.graphs().count() >= self.most_graphs.max(1)
            || self.graphs().map(|(_, _, nodes)| nodes).sum::<usize>() + nodes > MOST_NODES
        {
            let oldest = self.graphs().min_by_key(|(_, entry, _)| entry.last).map(|(shapes, ..)| shapes.clone());
            let Some(oldest) = oldest else { break };
            gone.extend(self.take(&oldest).map(|graph| (oldest, graph)));
        }
        self.settle(shapes, Standing::Graph { graph, nodes });
        gone
    }

    /// Notes that a trial gave no graph.
    pub(super) fn give_up(&mut self, shapes: &Shapes) {
        self.settle(shapes, Standing::Plain);
    }

    fn settle(&mut self, shapes: &Shapes, standing: Standing<G>) {
        let entry = ShapeEntry { count: 0, last: self.runs, standing };
        self.entries.insert(shapes.to_vec(), entry);
    }

    /// Removes a graph; its shapes are as new.
    fn take(&mut self, shapes: &Shapes) -> Option<G> {
        let ShapeEntry { count, last, standing } = self.entries.remove(shapes)?;
        self.entries.insert(shapes.to_vec(), ShapeEntry { count: 0, last, standing: Standing::New });
        match standing {
            Standing::Graph { graph, .. } => {
                self.forget_trial(count);
                Some(graph)
            }
            Standing::New | Standing::Plain => None,
        }
    }

    /// Removes the graphs of all other shapes.
    pub(super) fn take_others(&mut self, shapes: &Shapes) -> Vec<(Vec<usize>, G)> {
        let others: Vec<_> =
            self.graphs().map(|(other, ..)| other).filter(|other| **other != shapes).cloned().collect();
        others.into_iter().filter_map(|other| self.take(&other).map(|graph| (other, graph))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Table = GraphTable<usize>;

    /// Runs these shapes; each trial gives a graph of `nodes` nodes, or none. Returns the number of
    /// trials.
    fn run(table: &mut Table, shapes: impl IntoIterator<Item = usize>, nodes: Option<usize>) -> usize {
        let mut tried = 0;
        for shape in shapes {
            if let (How::Try, _) = table.next(&[shape]) {
                tried += 1;
                match nodes {
                    Some(nodes) => drop(table.keep(&[shape], shape, nodes)),
                    None => table.give_up(&[shape]),
                }
            }
        }
        tried
    }

    fn graphs(table: &Table) -> Vec<usize> {
        table.graphs().map(|(shapes, ..)| shapes[0]).collect()
    }

    #[test]
    fn a_shape_is_tried_when_it_comes_again_and_once() {
        let mut table = Table::new(usize::MAX);
        assert_eq!(run(&mut table, [1, 2, 3], Some(1)), 0);
        assert!(!table.has_graphs());
        assert_eq!(run(&mut table, [2, 3], Some(1)), 2);
        assert_eq!(table.next(&[2]).0, How::Graph(&mut 2));
        assert_eq!(run(&mut table, [1], None), 1);
        assert_eq!(run(&mut table, [1; 300], None), 0, "what came of it is remembered");
        assert_eq!(graphs(&table), [2, 3]);
    }

    #[test]
    fn the_graph_that_was_not_launched_for_longest_makes_room() {
        let mut table = Table::new(2);
        run(&mut table, [1, 1, 2, 2, 1], Some(1));
        // Each graph was worth its trial.
        run(&mut table, [2; 100], Some(1));
        run(&mut table, [1; 100], Some(1));
        table.next(&[3]);
        assert_eq!(table.next(&[3]).0, How::Try);
        assert_eq!(table.keep(&[3], 3, 1), [(vec![2], 2)]);
        assert_eq!(graphs(&table), [1, 3]);
        // The shape may come back.
        assert_eq!(run(&mut table, [2, 2], Some(1)), 1);
    }

    #[test]
    fn nodes_are_bounded_too() {
        let mut table = Table::new(usize::MAX);
        run(&mut table, (0..8).flat_map(|shape| [shape; 200]), Some(MOST_NODES / 4));
        assert_eq!(graphs(&table), [4, 5, 6, 7]);
        let mut table = Table::new(usize::MAX);
        run(&mut table, (0..100).flat_map(|shape| [shape; 200]), Some(1));
        assert_eq!(graphs(&table).len(), MOST_GRAPHS);
        run(&mut table, [200; 2], Some(MOST_NODES * 2));
        assert_eq!(graphs(&table), [200], "one may be as large as it is");
    }

    /// More shapes alternate than there is room for: trials become rare, instead of a fixed part of
    /// the runs.
    #[test]
    fn trials_end_where_shapes_come_and_go() {
        for (shapes, nodes) in [(MOST_GRAPHS + 1, Some(1)), (MOST_SHAPES * 4, Some(1)), (MOST_SHAPES * 4, None)] {
            let mut table = Table::new(usize::MAX);
            const RUNS: usize = 1 << 14;
            let rounds = RUNS / shapes;
            let early = run(&mut table, (0..rounds).flat_map(|_| 0..shapes), nodes);
            let late = run(&mut table, (0..rounds).flat_map(|_| 0..shapes), nodes);
            assert!(early < 200 && late <= RUNS / 200, "{shapes} shapes: {early}, then {late} trials");
        }
        // With repeats, so that each shape is tried before it is forgotten.
        let mut table = Table::new(usize::MAX);
        let tried = run(&mut table, (0..5_000).flat_map(|at| [at % (4 * MOST_SHAPES); 3]), None);
        assert!(tried < 500, "{tried} trials");
    }

    #[test]
    fn graphs_of_other_shapes_can_be_taken_away() {
        let mut table = Table::new(1);
        run(&mut table, [1, 1], Some(1));
        assert_eq!(table.take_others(&[1]), []);
        assert_eq!(table.take_others(&[2]), [(vec![1], 1)]);
        assert!(!table.has_graphs());
        assert_eq!(table.next(&[1]).0, How::Plain, "it is as new");
    }
}
