//! What messages out of their order, and two supervisors of one epoch, may not do.

use anyhow::{Result, ensure};
use towpath_faults::{Life, World, life};
use towpath_run::report::{Greeting, Report};

/// What happens at the end of a run, each of which may be the first to be heard of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Happening {
    Ended,
    Printed,
    SealedTold,
    ObservedTold,
}

const HAPPENINGS: [Happening; 4] = [Happening::Ended, Happening::Printed, Happening::SealedTold, Happening::ObservedTold];

async fn happen(world: &World, life: &Life, what: Happening) -> Result<()> {
    match what {
        Happening::Ended => life::tell(&world.first.chassis, &life.reporter(), life::ended(0)).await.map(|_| ()),
        Happening::Printed => {
            world.print(life).await?;
            life::seal(&world.first, life).await
        }
        Happening::SealedTold => life::handle(&world.first, "run", vec![life.sealed()]).await,
        Happening::ObservedTold => life::handle(&world.first, "run", vec![life.observed()]).await,
    }
}

fn orders(left: &[Happening]) -> Vec<Vec<Happening>> {
    if left.is_empty() {
        return vec![Vec::new()];
    }
    left.iter()
        .flat_map(|first| {
            let rest: Vec<Happening> = left.iter().copied().filter(|other| other != first).collect();
            orders(&rest).into_iter().map(|order| std::iter::once(*first).chain(order).collect()).collect::<Vec<_>>()
        })
        .collect()
}

#[tokio::test]
async fn a_run_ends_the_same_in_whatever_order_its_end_is_told() -> Result<()> {
    let mut world = World::start().await?;
    let mut reference = None;
    for order in orders(&HAPPENINGS) {
        world.anew().await?;
        let life = world.steered().await?;
        life::tell(&world.first.chassis, &life.reporter(), life::result("done")).await?;
        for what in &order {
            happen(&world, &life, *what).await?;
        }
        world.recover().await?;
        let outcome = world.outcome().await?;
        let expected = reference.get_or_insert_with(|| outcome.clone());
        ensure!(*expected == outcome, "{order:?} ends otherwise:\n{expected}\n---\n{outcome}");
    }
    let outcome = reference.unwrap_or_default();
    ensure!(outcome.contains("run work succeeded") && outcome.contains("results told: 1"), "{outcome}");
    Ok(())
}

#[tokio::test]
async fn of_two_supervisors_of_an_epoch_one_is_bound_and_the_other_fenced() -> Result<()> {
    let mut world = World::start().await?;
    for _ in 0..20 {
        world.anew().await?;
        let life = world.created().await?;
        let (one, other) = (life.hello(&world.first.chassis), life.impostor().hello(&world.second.chassis));
        let (one, other) = tokio::join!(life::hello(&world.first.chassis, one), life::hello(&world.second.chassis, other));
        let welcome = [one?, other?].into_iter().filter(|greeting| matches!(greeting, Greeting::Welcome { .. })).count();
        ensure!(welcome == 1, "{welcome} supervisors of one epoch are welcome");
    }
    Ok(())
}

#[tokio::test]
async fn nothing_that_an_impostor_says_changes_anything() -> Result<()> {
    let world = World::start().await?;
    let life = world.steered().await?;
    let before = world.digest().await?;
    let (chassis, impostor) = (&world.first.chassis, life.impostor().reporter());
    life::tell(chassis, &impostor, life::step("started")).await?;
    life::tell(chassis, &impostor, life::result("lies")).await?;
    life::tell(chassis, &impostor, life::ended(0)).await?;
    ensure!(!life::tell(chassis, &impostor, Report::SteersSent(life.steers.clone())).await?, "an impostor was given a steer");
    ensure!(world.digest().await? == before, "an impostor changed the world:\n{before}\n---\n{}", world.digest().await?);
    Ok(())
}
