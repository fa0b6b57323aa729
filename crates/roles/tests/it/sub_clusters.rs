//! A scheduler that assigns models to backends (Symphony §4.4).

use downbeat_core::Duration;
use downbeat_roles::*;

use crate::scheduler_node::{LOST_AFTER, World, model, ms, offer};

fn options(count: u32) -> SubClusterOptions {
    SubClusterOptions {
        count: SubClusterCount::Fixed(count),
        plan_every: Duration::from_millis(10_000),
        moves: MoveLimit::Any,
        most_requests: None,
    }
}

/// A lone scheduler that leads, and divides models among so many sub-clusters.
fn leading(count: u32) -> World {
    let mut world = World::with(0, 1, Some(options(count)));
    world.pass(ms(4));
    world
}

/// An offer with models `m` and `n` in the repository, and these models loaded.
fn managed(loaded: &[&str], assigned: Option<&Assignment>) -> Offer {
    let loadable =
        |name: &str| Loadable { model: name.into(), memory: 1, run_memory: 0, load_time: None, failed: None };
    Offer {
        repository: ["m", "n"].map(loadable).to_vec(),
        assigned: assigned.cloned(),
        ..offer(1, loaded.iter().map(|name| model(name, ms(5), 1)).collect())
    }
}

/// The last assignment that the backend received.
fn told(world: &mut World, backend: NodeId) -> Option<Assignment> {
    let told = |message| if let Message::Assign(assigned) = message { Some(assigned) } else { None };
    world.heard(backend).into_iter().filter_map(told).next_back()
}

/// The models of an assignment: those of the backend's sub-cluster, and the ones that it keeps
/// until other backends have them.
fn models(assigned: &Assignment) -> (Vec<&str>, Vec<&str>) {
    let names = |models| Vec::from_iter(std::iter::Iterator::map(<[String]>::iter(models), String::as_str));
    (names(&assigned.planned), names(&assigned.kept))
}

/// Answers the last question: the sub-cluster of `m`, and of `n`.
fn answer(world: &mut World, plan: [u32; 2]) {
    let wanted = world.wanted.pop().expect("a question");
    let divided = Divided { sub_clusters: wanted.most, models: plan.to_vec(), too_many_requests: None };
    world.node.handle_planned(wanted.number, Ok(divided));
    world.exchange();
}

fn divide_anew(world: &mut World, plan: [u32; 2]) {
    assert!(world.node.handle_plan_wanted(world.now));
    world.exchange();
    answer(world, plan);
}

/// Two backends: the first has `m` in sub-cluster 0, the second `n` in 1.
fn two(world: &mut World) -> [(NodeId, Assignment); 2] {
    let backends = [(1, ["m"]), (3, ["n"])].map(|(node, loaded)| world.backend(node, vec![], managed(&loaded, None)));
    world.pass(LOST_AFTER);
    answer(world, [0, 1]);
    backends.map(|backend| (backend, told(world, backend).expect("told what to have")))
}

#[test]
fn section_4_4_a_model_is_loaded_before_it_leaves_its_old_backend() {
    let mut world = leading(2);
    let [(first, _), (second, _)] = two(&mut world);
    divide_anew(&mut world, [1, 1]);
    let to_first = told(&mut world, first).unwrap();
    let to_second = told(&mut world, second).unwrap();
    assert_eq!((models(&to_first), models(&to_second)), ((vec![], vec!["m"]), (vec!["m", "n"], vec![])));
    world.say(second, Message::offer(managed(&["m", "n"], Some(&to_second))));
    assert_eq!(models(&told(&mut world, first).unwrap()), (vec![], vec![]));
}

#[test]
fn section_4_4_a_whole_sub_cluster_has_a_model_before_others_lose_it() {
    let mut world = leading(2);
    let nodes = [1, 3, 4, 5].map(|node| world.backend(node, vec![], managed(&["m", "n"], None)));
    world.pass(LOST_AFTER);
    answer(&mut world, [0, 1]);
    for node in nodes {
        let assigned = told(&mut world, node).unwrap();
        let has = models(&assigned).0;
        assert_eq!((has.len(), models(&assigned).1.len()), (1, 0), "all have all");
        world.say(node, Message::offer(managed(&has, Some(&assigned))));
    }
    divide_anew(&mut world, [1, 0]);
    let all = nodes.map(|node| (node, told(&mut world, node).unwrap()));
    let of = |group: u32| all.iter().filter(move |(_, assigned)| assigned.sub_cluster == group);
    let (olds, news): (Vec<_>, Vec<_>) = (of(0).collect(), of(1).collect());
    assert!(olds.iter().all(|(_, assigned)| models(assigned) == (vec!["n"], vec!["m"])), "{olds:?}");
    world.say(news[0].0, Message::offer(managed(&["m", "n"], Some(&news[0].1))));
    assert_eq!(told(&mut world, olds[0].0), None, "one has it, the other has not");
    world.say(news[1].0, Message::offer(managed(&["m", "n"], Some(&news[1].1))));
    assert_eq!(models(&told(&mut world, olds[0].0).unwrap()).1, Vec::<&str>::new());
}

#[test]
fn no_plan_uses_a_model_that_is_told_to_leave_its_backend() {
    let mut world = leading(2);
    let [(first, before), (second, _)] = two(&mut world);
    let frontend = world.frontend(2);
    divide_anew(&mut world, [1, 1]);
    let to_second = told(&mut world, second).unwrap();
    world.say(second, Message::offer(managed(&["m", "n"], Some(&to_second))));
    // The backend's offer crosses with the assignment on its way.
    world.say(first, Message::offer(managed(&["m"], Some(&before))));
    world.ask(frontend, &[0, 1], ms(100));
    world.ask(frontend, &[2], ms(100));
    assert_eq!((world.plans(first).len(), world.plans(second).len()), (0, 1));
}

#[test]
fn what_is_told_to_go_while_it_is_loaded_is_not_planned_there_once_it_is() {
    let mut world = leading(2);
    let [(first, _), (second, _)] = two(&mut world);
    let frontend = world.frontend(2);
    divide_anew(&mut world, [1, 1]);
    let loads = told(&mut world, second).unwrap();
    // The second backend is loading `m`, and a new plan leaves `m` where it was.
    divide_anew(&mut world, [0, 1]);
    let back = told(&mut world, second).unwrap();
    assert!(!back.has("m"));
    world.say(second, Message::offer(managed(&["m", "n"], Some(&loads))));
    world.ask(frontend, &[0], ms(100));
    world.ask(frontend, &[1], ms(100));
    assert_eq!((world.plans(first).len(), world.plans(second).len()), (1, 0));
}

#[test]
fn a_backend_that_leaves_is_let_go_once_others_have_its_models() {
    let mut world = leading(2);
    let [(first, _), (second, _)] = two(&mut world);
    world.say(first, Message::Leave);
    world.pass(LOST_AFTER + ms(1));
    answer(&mut world, [0, 0]);
    let to_second = told(&mut world, second).unwrap();
    assert_eq!(models(&to_second), (vec!["m", "n"], vec![]));
    assert!(!world.heard(first).contains(&Message::LetGo), "nobody else has m");
    world.say(second, Message::offer(managed(&["m", "n"], Some(&to_second))));
    assert!(world.heard(first).contains(&Message::LetGo));
}

/// Without this rule a drained backend would never go.
#[test]
fn a_backend_that_leaves_is_let_go_if_there_is_no_plan_for_its_models() {
    let mut world = leading(2);
    let [_, (second, _)] = two(&mut world);
    world.say(second, Message::Leave);
    world.pass(LOST_AFTER + ms(1));
    let wanted = world.wanted.pop().unwrap();
    assert!(!world.heard(second).contains(&Message::LetGo), "a plan is to come");
    world.node.handle_planned(wanted.number, Err("they do not fit".into()));
    world.exchange();
    assert!(world.heard(second).contains(&Message::LetGo), "nobody can have n");
    assert!(world.notes.iter().any(|note| note.contains("they do not fit")), "{:?}", world.notes);
}

#[test]
fn a_backend_that_leaves_has_what_nobody_else_can_have_until_it_is_let_go() {
    let mut world = leading(1);
    let first = world.backend(1, vec![], managed(&["m", "n"], None));
    world.pass(LOST_AFTER);
    answer(&mut world, [0, 0]);
    let second = world.backend(3, vec![], managed(&[], None));
    let to_second = told(&mut world, second).unwrap();
    world.heard(first);
    world.say(first, Message::Leave);
    let mut failed = managed(&[], Some(&to_second));
    failed.repository[0].failed = Some("no".into());
    world.say(second, Message::offer(failed.clone()));
    assert_eq!(told(&mut world, first).unwrap().kept, ["m", "n"], "n is on its way");
    failed.models = vec![model("n", ms(5), 1)];
    world.say(second, Message::offer(failed));
    assert!(world.heard(first).contains(&Message::LetGo));
}

#[test]
fn a_new_leader_goes_on_from_what_backends_were_told_and_moves_nothing() {
    let mut before = leading(3);
    let nodes = [1, 3, 4];
    let all = nodes.map(|node| before.backend(node, vec![], managed(&["m", "n"], None)));
    before.pass(LOST_AFTER);
    answer(&mut before, [1, 0]);
    let said = all.map(|backend| told(&mut before, backend).unwrap());
    let mut world = leading(3);
    for (node, assigned) in nodes.iter().zip(&said) {
        let has = models(assigned).0;
        world.backend(*node, vec![], managed(&has, Some(assigned)));
    }
    world.pass(LOST_AFTER.saturating_mul(4));
    assert_eq!(world.wanted, [], "the third sub-cluster has no models, and is known all the same");
    for (node, before) in all.into_iter().zip(&said) {
        let now = told(&mut world, node).unwrap();
        assert_eq!((now.plan, now.sub_cluster, models(&now)), (before.plan, before.sub_cluster, models(before)));
    }
}

#[test]
fn a_kept_plan_of_a_lower_stamp_does_not_replace_a_newer_one() {
    let mut world = World::with(0, 1, Some(options(2)));
    let plan = |number, m, n| SubClusterPlan {
        stamp: Stamp { epoch: Epoch { number: 1, rank: 0 }, number },
        sub_clusters: 2,
        models: [("m".to_owned(), m), ("n".to_owned(), n)].into(),
    };
    world.node.handle_kept_plan(plan(5, 1, 0));
    world.node.handle_kept_plan(plan(4, 0, 1));
    world.pass(ms(4));
    let [first, second] = [1, 3].map(|node| world.backend(node, vec![], managed(&["m", "n"], None)));
    world.pass(LOST_AFTER);
    let [first, second] = [first, second].map(|backend| told(&mut world, backend).unwrap());
    assert_eq!((models(&first).0, models(&second).0, world.wanted.len()), (vec!["n"], vec!["m"], 0));
}

#[test]
fn a_model_that_fails_to_load_serves_in_another_sub_cluster() {
    let mut world = leading(2);
    let [(first, _), (second, _)] = two(&mut world);
    divide_anew(&mut world, [1, 1]);
    let to_second = told(&mut world, second).unwrap();
    let mut failed = managed(&["n"], Some(&to_second));
    failed.repository[0].failed = Some("no".into());
    told(&mut world, first);
    world.say(second, Message::offer(failed));
    let stays = told(&mut world, first).unwrap();
    assert_eq!(
        (models(&stays), models(&told(&mut world, second).unwrap())),
        ((vec!["m"], vec![]), (vec!["n"], vec![]))
    );
    assert!(world.node.handle_plan_wanted(world.now));
    world.exchange();
    assert_eq!(world.wanted.last().unwrap().models[0].running, Some(0), "that is where it is");
    answer(&mut world, [1, 1]);
    // With a new plan a backend forgets its failed loads, and says so with its offer.
    let anew = told(&mut world, second).unwrap();
    world.say(second, Message::offer(managed(&["n"], Some(&anew))));
    assert_eq!(models(&told(&mut world, second).unwrap()), (vec!["m", "n"], vec![]));
}

#[test]
fn there_are_no_more_sub_clusters_than_backends_and_one_backend_has_all() {
    let mut world = leading(4);
    let backend = world.backend(1, vec![], managed(&["n"], None));
    world.pass(LOST_AFTER);
    assert_eq!(world.wanted[0].most, 1);
    answer(&mut world, [0, 0]);
    assert_eq!(models(&told(&mut world, backend).unwrap()), (vec!["m", "n"], vec![]));
}

#[test]
fn a_backend_is_told_to_have_only_what_its_repository_has() {
    let mut world = leading(1);
    let first = world.backend(1, vec![], managed(&[], None));
    let mut other = managed(&[], None);
    other.repository.remove(0);
    let second = world.backend(3, vec![], other);
    world.pass(LOST_AFTER);
    answer(&mut world, [0, 0]);
    let [first, second] = [first, second].map(|backend| told(&mut world, backend).unwrap());
    assert_eq!((models(&first).0, models(&second).0), (vec!["m", "n"], vec!["n"]));
}

#[test]
fn a_backend_without_a_repository_has_its_models_by_itself() {
    let mut world = leading(2);
    let backend = world.backend(1, vec![], offer(1, vec![model("m", ms(5), 1)]));
    world.pass(LOST_AFTER.saturating_mul(3));
    assert_eq!((told(&mut world, backend), world.wanted.len()), (None, 0));
    world.say(backend, Message::Leave);
    assert!(world.heard(backend).contains(&Message::LetGo));
}

/// The models of the last question by name.
fn asked(world: &mut World) -> PlanWanted {
    assert!(world.node.handle_plan_wanted(world.now));
    world.exchange();
    world.wanted.pop().expect("a question")
}

/// Symphony appendix A: backends measure `s`, `d` and `c` of each model.
#[test]
fn appendix_a_a_question_has_what_backends_have_measured() {
    let mut world = leading(2);
    let with = |of: [(u64, u64, Option<Duration>); 2], loaded: &[&str]| {
        let mut offer = managed(loaded, None);
        for (loadable, (memory, run_memory, load_time)) in offer.repository.iter_mut().zip(of) {
            (loadable.memory, loadable.run_memory, loadable.load_time) = (memory, run_memory, load_time);
        }
        Offer { memory: Some(1000), runs: Some(70), ..offer }
    };
    world.backend(1, vec![], with([(100, 20, Some(ms(300))), (60, 0, None)], &["m"]));
    world.backend(3, vec![], with([(90, 30, Some(ms(200))), (50, 0, None)], &["m"]));
    world.pass(LOST_AFTER);
    let wanted = world.wanted.pop().expect("a question");
    let [m, n] = &wanted.models[..] else { panic!("{wanted:?}") };
    assert_eq!((m.memory, m.run_memory, m.load_time), (100, 30, ms(300)), "the most of both backends");
    assert_eq!(m.loaded_in, [0, 1]);
    // 500 ms for 190 bytes of `m`, so 157.9 ms for the 60 bytes of `n`.
    assert_eq!((n.memory, n.run_memory, n.load_time.as_millis_f64().round()), (60, 0, 158.0));
    assert_eq!((n.loaded_in.len(), n.running), (0, None));
    assert_eq!((wanted.memory, wanted.runs, wanted.least, wanted.most), (Some(1000), Some(70), 2, 2));
}

#[test]
fn section_4_4_the_plan_says_how_many_sub_clusters_there_are() {
    let mut world = World::with(0, 1, Some(SubClusterOptions { count: SubClusterCount::Least, ..options(0) }));
    world.pass(ms(4));
    let nodes = [1, 3, 4].map(|node| world.backend(node, vec![], managed(&["m", "n"], None)));
    world.pass(LOST_AFTER);
    let first = world.wanted.pop().expect("a question");
    assert_eq!((first.least, first.most, first.present), (1, 3, 0));
    world
        .node
        .handle_planned(first.number, Ok(Divided { sub_clusters: 1, models: vec![0, 0], too_many_requests: None }));
    world.exchange();
    let groups = |world: &mut World| nodes.map(|node| told(world, node).expect("an assignment").sub_cluster);
    assert_eq!(groups(&mut world), [0, 0, 0]);
    let again = asked(&mut world);
    assert_eq!((again.least, again.most, again.present), (1, 3, 1));
    world
        .node
        .handle_planned(again.number, Ok(Divided { sub_clusters: 2, models: vec![0, 1], too_many_requests: None }));
    world.exchange();
    let mut of = groups(&mut world);
    of.sort_unstable();
    assert_eq!(of, [0, 0, 1], "of even size");
}

#[test]
fn a_plan_with_more_sub_clusters_than_asked_for_is_cut() {
    let mut world = leading(2);
    two(&mut world);
    let wanted = asked(&mut world);
    world
        .node
        .handle_planned(wanted.number, Ok(Divided { sub_clusters: 9, models: vec![8, 0], too_many_requests: None }));
    world.exchange();
    let groups = world.node.sub_clusters();
    assert_eq!(groups.iter().map(|group| &group.models[..]).collect::<Vec<_>>(), [["n"], ["m"]]);
}

#[test]
fn a_model_that_does_not_load_asks_once_for_more_sub_clusters() {
    let mut world = World::with(0, 1, Some(SubClusterOptions { count: SubClusterCount::Least, ..options(0) }));
    world.pass(ms(4));
    let nodes = [1, 3].map(|node| world.backend(node, vec![], managed(&[], None)));
    world.pass(LOST_AFTER);
    for is_first in [true, false] {
        let wanted = world.wanted.pop().expect("a question");
        world.node.handle_planned(
            wanted.number,
            Ok(Divided { sub_clusters: 1, models: vec![0, 0], too_many_requests: None }),
        );
        world.exchange();
        for node in nodes {
            let assigned = told(&mut world, node);
            let mut failed = managed(&["m"], assigned.as_ref());
            failed.repository[1].failed = Some("no memory".into());
            world.say(node, Message::offer(failed));
        }
        world.pass(LOST_AFTER + ms(1));
        assert_eq!(world.wanted.len(), usize::from(is_first), "the same failure is asked about once");
    }
}
