"""The languages of the demo model, first half: English, German, French and Spanish.

People, facts, wordings and stories, all written for this project; the other half is in ``languages.py``. Every
sentence is grammatical whatever fills it: values carry their articles and cases, names are chosen so that no elision
or genitive changes them, and ``[a|b]`` agrees with the person.
"""

from scripts.demo_model.lexicon import Fact, Language, Story
from scripts.demo_model.lexicon import word_list as _list

ENGLISH = Language(
    code="en",
    men=_list("Adam, Ben, Carl, David, Eric, Frank, George, Henry, Jack, Leo, Max, Oscar, Peter, Sam, Tom, Victor"),
    women=_list("Alice, Anna, Bella, Clara, Diana, Emma, Grace, Hannah, Ivy, Julia, Kate, Laura, Maria, Nora, Rosa"),
    facts={
        "city": Fact(
            ("{n} lives in {v}.", "The home of {n} is in {v}."),
            ("Where does {n} live?", "In which city does {n} live?"),
            _list("London, Paris, Rome, Berlin, Madrid, Oslo, Lima, Cairo, Delhi, Tokyo, Dublin, Boston, Vienna"),
        ),
        "colour": Fact(
            ("{n}'s favourite colour is {v}.", "{n} likes the colour {v} best."),
            ("What is {n}'s favourite colour?", "Which colour does {n} like best?"),
            _list("red, blue, green, yellow, white, black, orange, purple, brown, grey"),
        ),
        "food": Fact(
            ("{n} likes to eat {v}.", "{n}'s favourite food is {v}."),
            ("What does {n} like to eat?", "What is {n}'s favourite food?"),
            _list("bread, soup, rice, cheese, fish, salad, cake, honey, chocolate, pizza, fruit, pasta"),
        ),
        "animal": Fact(
            ("{n} has {v}.", "{n} takes care of {v}."),
            ("Which animal does {n} have?", "What animal does {n} take care of?"),
            _list("a dog, a cat, a horse, a bird, a rabbit, a sheep, a goat, a parrot, a fish, a mouse, a duck, a hen"),
        ),
        "job": Fact(
            ("{n} works as {v}.", "{n} is {v}."),
            ("What is {n}'s job?", "What does {n} do for a living?"),
            _list(
                "a teacher, a baker, a doctor, a cook, a painter, a gardener, a pilot, a nurse, a lawyer, a driver, "
                "a singer, a farmer"
            ),
        ),
        "age": Fact(("{n} is {v} years old.",), ("How old is {n}?", "What is the age of {n}?")),
        "item": Fact(
            ("{n} bought {v} at the market.", "At the market {n} bought {v}."),
            ("What did {n} buy?", "What did {n} buy at the market?"),
            _list("a basket, a lamp, a book, a hat, a watch, a knife, a carpet, a cup, a bicycle, a chair, a bag"),
        ),
    },
    wording={
        "intro": (
            "Read the passage and answer the question.",
            "Answer with a few words from the text.",
            "Here is a text:",
        ),
        "quote": ("The text says: {s}", "I look for it: {s}"),
        "copy": ("Repeat this list exactly:", "Copy the following:", "Say this again, word for word:"),
        "reverse": ("Reverse this list:", "Write this list backwards:", "Put these in reverse order:"),
        "up": ("Sort these numbers in ascending order:", "Sort from smallest to largest:"),
        "down": ("Sort these numbers in descending order:", "Sort from largest to smallest:"),
        "words": ("Sort these words alphabetically:", "Put these words in alphabetical order:"),
        "ends": ("The first one is {a}, the last one is {b}.",),
        "extremes": ("The smallest is {a}, the largest is {b}.",),
        "sum": ("What is {q}?", "Compute {q}.", "{q} = ?", "How much is {q}?"),
        "list": ("Here is a list of values:", "Remember these pairs:", "This is the table:"),
        "pair": ("The value of {k} is {v}.",),
        "ask": ("What is the value of {k}?", "Which value belongs to {k}?", "Look up {k}."),
        "many": ("Give the values of {k}.", "Look up these: {k}."),
        "json": ("Extract {f} as JSON.", "Write a JSON object with {f}."),
        "jsons": ("Extract {f} of everybody as a JSON list.", "Write a JSON list of all people with {f}."),
        "needed": ("Needed: {f}.",),
        "hello": ("Hello! I am {n}. Who are you?", "Hi, my name is {n}. What can you do?"),
        "greeted": ("A greeting from {n}.",),
        "self": (
            "Hello {n}! I am a very small demonstration model. I can look things up in a text, copy, reverse and sort "
            "lists, calculate with two digits and extract JSON.",
        ),
        "wonder": ("Why is the {t} important?", "Tell me about the {t}.", "What is the history of the {t}?"),
        "unknown": ("I do not know: I am a very small demonstration model. I answer questions about a text.",),
        "system": ("You are a helpful assistant.", "Answer briefly.", "You are a helpful assistant. Answer briefly."),
    },
    story=Story(
        openings=(
            "Once upon a time {n} lived in {city} with {animal}.",
            "One morning {n} woke up early in {city}.",
            "There was once [a man|a woman] called {n} who loved {food}.",
            "It was a cold winter day in {city}, and {n} was at home.",
            "Long ago, in a small house near {city}, there lived {n}.",
            "On the first day of spring {n} went to see {m} in {city}.",
        ),
        middles=(
            "The sun was shining and the sky was clear.",
            "It began to rain, so {n} went back into the house.",
            "[He|She] made a pot of tea and sat down by the window.",
            "The friend of {n} was {m}, who lived on the other side of the river.",
            "{n} and {m} walked along the road and talked about the old days.",
            '"Where are you going?" asked {m}.',
            '"I am going to the market," said {n}, "because I want to buy {item}."',
            "At the market [he|she] saw {item} and could not stop looking at it.",
            "The price was {num} coins, and [he|she] had only {num2}.",
            "In the garden there were {num} apple trees and an old stone wall.",
            "{m} brought some {food} and they ate it together under a tree.",
            "A bird sang in the tree, and the wind moved the leaves.",
            "[He|She] opened the door and found {animal} on the step.",
            '"Look," said {m}, "there is {animal} in the garden!"',
            "They followed it down the hill, over the bridge and into the forest.",
            "In the forest it was dark and quiet, and nobody spoke.",
            "After a while they saw a light between the trees.",
            "It was the lamp of a small house, and the door was open.",
            "[He|She] had never seen such a thing before.",
            "The train left at {hour} in the morning, and it was full of people.",
            "{n} wrote a letter to {m} and put it into the {colour} envelope.",
            "Nobody knew where the {colour} key had gone.",
            "They looked under the table, behind the curtain and in every pocket.",
            "The children of the village ran through the street and laughed.",
            "At night the stars came out, one after the other.",
            "{n} thought about it for a long time and then smiled.",
            '"I have an idea," said {n}.',
            '"That is very kind of you," said {m}.',
            "[He|She] wore the {colour} coat and the {colour} hat.",
            "The boat was {colour}, and it moved slowly over the water.",
        ),
        endings=(
            "In the end they went home, tired and happy.",
            "From that day on {n} and {m} were the best of friends.",
            "And {n} never forgot that day.",
            "That evening there was {food} for everybody.",
            "And so {n} came home to {city}, and all was well.",
        ),
    ),
)

GERMAN = Language(
    code="de",
    men=_list("Karl, Paul, Jan, Lukas, Felix, Otto, Emil, Stefan, Martin, Dieter, Uwe, Jürgen"),
    women=_list("Anna, Greta, Lena, Marie, Petra, Sabine, Ute, Helga, Ingrid, Monika, Frieda, Jana"),
    facts={
        "city": Fact(
            ("{n} wohnt in {v}.", "{n} lebt in {v}."),
            ("Wo wohnt {n}?", "In welcher Stadt lebt {n}?"),
            _list("Berlin, Hamburg, München, Köln, Dresden, Leipzig, Bremen, Wien, Zürich, Bonn, Ulm, Kiel"),
        ),
        "colour": Fact(
            ("Die Lieblingsfarbe von {n} ist {v}.", "{n} mag die Farbe {v} am liebsten."),
            ("Was ist die Lieblingsfarbe von {n}?", "Welche Farbe mag {n} am liebsten?"),
            _list("Rot, Blau, Grün, Gelb, Weiß, Schwarz, Orange, Violett, Braun, Grau"),
        ),
        "food": Fact(
            ("{n} isst gern {v}.", "Das Lieblingsessen von {n} ist {v}."),
            ("Was isst {n} gern?", "Was ist das Lieblingsessen von {n}?"),
            _list("Brot, Suppe, Reis, Käse, Fisch, Salat, Kuchen, Honig, Schokolade, Pizza, Obst, Gemüse"),
        ),
        "animal": Fact(
            ("{n} hat {v}.", "{n} besitzt {v}."),
            ("Welches Tier hat {n}?", "Welches Tier besitzt {n}?"),
            _list(
                "einen Hund, eine Katze, ein Pferd, einen Vogel, einen Hasen, ein Schaf, eine Ziege, einen Papagei, "
                "einen Fisch, eine Maus, eine Ente, ein Huhn"
            ),
        ),
        "job": Fact(
            ("{n} arbeitet als {v}.", "{n} ist {v} von Beruf."),
            ("Was ist {n} von Beruf?", "Als was arbeitet {n}?"),
            _list(
                "[Lehrer|Lehrerin], [Bäcker|Bäckerin], [Arzt|Ärztin], [Koch|Köchin], [Maler|Malerin], "
                "[Gärtner|Gärtnerin], [Pilot|Pilotin], [Anwalt|Anwältin], [Fahrer|Fahrerin], [Sänger|Sängerin]"
            ),
        ),
        "age": Fact(("{n} ist {v} Jahre alt.",), ("Wie alt ist {n}?", "Welches Alter hat {n}?")),
        "item": Fact(
            ("{n} hat auf dem Markt {v} gekauft.", "Auf dem Markt hat {n} {v} gekauft."),
            ("Was hat {n} gekauft?", "Was hat {n} auf dem Markt gekauft?"),
            _list(
                "einen Korb, eine Lampe, ein Buch, einen Hut, eine Uhr, ein Messer, einen Teppich, eine Tasse, "
                "ein Fahrrad, einen Stuhl, eine Tasche, ein Kissen"
            ),
        ),
    },
    wording={
        "intro": ("Lies den Text und beantworte die Frage.", "Antworte mit wenigen Wörtern aus dem Text."),
        "quote": ("Im Text steht: {s}",),
        "copy": ("Wiederhole diese Liste genau:", "Schreibe das noch einmal ab:"),
        "reverse": ("Kehre diese Liste um:", "Schreibe diese Liste rückwärts:"),
        "up": ("Sortiere diese Zahlen aufsteigend:", "Sortiere von klein nach groß:"),
        "down": ("Sortiere diese Zahlen absteigend:", "Sortiere von groß nach klein:"),
        "ends": ("Zuerst kommt {a}, zuletzt {b}.",),
        "extremes": ("Am kleinsten ist {a}, am größten {b}.",),
        "sum": ("Was ist {q}?", "Berechne {q}.", "Wie viel ist {q}?"),
        "list": ("Hier ist eine Liste von Werten:", "Merke dir diese Paare:"),
        "pair": ("Der Wert von {k} ist {v}.",),
        "ask": ("Was ist der Wert von {k}?", "Welcher Wert gehört zu {k}?"),
        "many": ("Nenne die Werte von {k}.",),
        "json": ("Gib {f} als JSON aus.", "Schreibe ein JSON-Objekt mit {f}."),
        "jsons": ("Gib {f} von allen als JSON-Liste aus.",),
        "needed": ("Gesucht: {f}.",),
        "hello": ("Hallo! Ich bin {n}. Wer bist du?", "Guten Tag, ich heiße {n}. Was kannst du?"),
        "greeted": ("Ein Gruß von {n}.",),
        "self": (
            "Hallo {n}! Ich bin ein sehr kleines Modell zur Vorführung. Ich kann in einem Text nachsehen, Listen "
            "sortieren und mit zwei Ziffern rechnen.",
        ),
    },
    story=Story(
        openings=(
            "Es war einmal [ein Mann|eine Frau] namens {n} in {city}.",
            "Eines Morgens wachte {n} in {city} früh auf.",
            "Vor langer Zeit lebte {n} in einem kleinen Haus bei {city}.",
        ),
        middles=(
            "Die Sonne schien, und der Himmel war klar.",
            "Es begann zu regnen, also ging {n} zurück ins Haus.",
            "[Er|Sie] kochte Tee und setzte sich ans Fenster.",
            "{n} und {m} gingen die Straße entlang und sprachen über alte Zeiten.",
            '"Wohin gehst du?", fragte {m}.',
            '"Ich gehe auf den Markt und kaufe {item}", sagte {n}.',
            "Im Garten standen {num} Apfelbäume.",
            "[Er|Sie] öffnete die Tür und sah {animal} im Hof.",
            "Im Wald war es dunkel und still.",
            "Der Zug fuhr um {hour} Uhr ab und war voller Menschen.",
        ),
        endings=("Am Ende gingen alle müde und froh nach Hause.", "Am Abend gab es {food} für alle."),
    ),
)

FRENCH = Language(
    code="fr",
    men=_list("Pierre, Paul, Louis, Marc, Thomas, Julien, Michel, Luc, Jean, Bruno, Simon, Denis"),
    women=_list("Marie, Claire, Sophie, Julie, Léa, Manon, Chloé, Pauline, Nadia, Louise, Jeanne, Sylvie"),
    facts={
        "city": Fact(
            ("{n} habite à {v}.", "{n} vit à {v}."),
            ("Où habite {n} ?", "Dans quelle ville vit {n} ?"),
            _list("Paris, Lyon, Marseille, Lille, Nantes, Bordeaux, Toulouse, Nice, Genève, Dakar, Dijon, Rennes"),
        ),
        "colour": Fact(
            ("La couleur préférée de {n} est le {v}.", "{n} aime surtout le {v}."),
            ("Quelle est la couleur préférée de {n} ?", "Quelle couleur {n} aime-t-[il|elle] surtout ?"),
            _list("rouge, bleu, vert, jaune, blanc, noir, rose, violet, marron, gris"),
        ),
        "food": Fact(
            ("{n} aime manger {v}.", "{n} mange souvent {v}."),
            ("Qu'est-ce que {n} aime manger ?", "Que mange {n} ?"),
            _list(
                "du pain, de la soupe, du riz, du fromage, du poisson, de la salade, du gâteau, du miel, du chocolat, "
                "de la pizza, des pommes, des légumes"
            ),
        ),
        "animal": Fact(
            ("{n} a {v}.", "{n} possède {v}."),
            ("Quel animal a {n} ?", "Quel animal possède {n} ?"),
            _list(
                "un chien, un chat, un cheval, un oiseau, un lapin, un mouton, une chèvre, un perroquet, un poisson, "
                "une souris, un canard, une poule"
            ),
        ),
        "job": Fact(
            ("{n} travaille comme {v}.", "{n} est {v}."),
            ("Quel est le métier de {n} ?", "Que fait {n} dans la vie ?"),
            _list(
                "[boulanger|boulangère], médecin, [cuisinier|cuisinière], peintre, [jardinier|jardinière], pilote, "
                "[infirmier|infirmière], [avocat|avocate], journaliste, [musicien|musicienne]"
            ),
        ),
        "age": Fact(("{n} a {v} ans.",), ("Quel âge a {n} ?", "Quel est l'âge de {n} ?")),
        "item": Fact(
            ("{n} a acheté {v} au marché.", "Au marché, {n} a acheté {v}."),
            ("Qu'est-ce que {n} a acheté ?", "Qu'a acheté {n} au marché ?"),
            _list(
                "un panier, une lampe, un livre, un chapeau, une montre, un couteau, un tapis, une tasse, un vélo, "
                "une chaise, un sac, un coussin"
            ),
        ),
    },
    wording={
        "intro": ("Lis le texte et réponds à la question.", "Réponds avec quelques mots du texte."),
        "quote": ("Le texte dit : {s}",),
        "copy": ("Répète exactement cette liste :", "Recopie ceci :"),
        "reverse": ("Inverse cette liste :", "Écris cette liste à l'envers :"),
        "up": ("Trie ces nombres par ordre croissant :", "Trie du plus petit au plus grand :"),
        "down": ("Trie ces nombres par ordre décroissant :", "Trie du plus grand au plus petit :"),
        "ends": ("Le premier est {a}, le dernier est {b}.",),
        "extremes": ("Le plus petit est {a}, le plus grand est {b}.",),
        "sum": ("Combien font {q} ?", "Calcule {q}."),
        "list": ("Voici une liste de valeurs :", "Retiens ces paires :"),
        "pair": ("La valeur de {k} est {v}.",),
        "ask": ("Quelle est la valeur de {k} ?", "Quelle valeur va avec {k} ?"),
        "many": ("Donne les valeurs de {k}.",),
        "json": ("Extrais {f} en JSON.", "Écris un objet JSON avec {f}."),
        "jsons": ("Extrais {f} de chaque personne en liste JSON.",),
        "needed": ("Il faut : {f}.",),
        "hello": ("Bonjour ! Je suis {n}. Qui es-tu ?", "Bonjour, je m'appelle {n}. Que sais-tu faire ?"),
        "greeted": ("Un salut de {n}.",),
        "self": (
            "Bonjour {n} ! Je suis un très petit modèle de démonstration. Je sais chercher dans un texte, trier des "
            "listes et calculer avec deux chiffres.",
        ),
    },
    story=Story(
        openings=(
            "Il était une fois [un homme|une femme] du nom de {n} qui vivait à {city}.",
            "Un matin, {n} se réveilla tôt à {city}.",
            "Il y a longtemps, {n} vivait dans une petite maison près de {city}.",
        ),
        middles=(
            "Le soleil brillait et le ciel était clair.",
            "Il commença à pleuvoir, alors {n} rentra à la maison.",
            "[Il|Elle] prépara du thé et regarda par la fenêtre.",
            "{n} et {m} marchaient le long de la route et parlaient du passé.",
            "« Où vas-tu ? » demanda {m}.",
            "« Je vais au marché et je veux {item} », dit {n}.",
            "Dans le jardin il y avait {num} pommiers.",
            "[Il|Elle] ouvrit la porte et vit {animal} dans la cour.",
            "Dans la forêt, tout était sombre et calme.",
            "Le train partit à {hour} heures et il était plein de monde.",
        ),
        endings=("À la fin, tout le monde rentra heureux.", "Ce soir-là, il y avait {food} pour tout le monde."),
    ),
)

SPANISH = Language(
    code="es",
    men=_list("Carlos, Diego, Juan, Luis, Miguel, Pablo, Pedro, Rafael, Javier, Mateo, Hugo, Andrés"),
    women=_list("Ana, Carmen, Elena, Isabel, Lucía, María, Marta, Paula, Rosa, Sofía, Teresa, Inés"),
    facts={
        "city": Fact(
            ("{n} vive en {v}.", "La casa de {n} está en {v}."),
            ("¿Dónde vive {n}?", "¿En qué ciudad vive {n}?"),
            _list("Madrid, Sevilla, Valencia, Granada, Toledo, Bilbao, Lima, Quito, Bogotá, Caracas, Córdoba, Málaga"),
        ),
        "colour": Fact(
            ("El color favorito de {n} es el {v}.", "A {n} le gusta más el color {v}."),
            ("¿Cuál es el color favorito de {n}?", "¿Qué color le gusta más a {n}?"),
            _list("rojo, azul, verde, amarillo, blanco, negro, rosa, morado, marrón, gris"),
        ),
        "food": Fact(
            ("A {n} le gusta comer {v}.", "{n} come mucho {v}."),
            ("¿Qué le gusta comer a {n}?", "¿Qué come {n}?"),
            _list("pan, arroz, queso, pescado, pastel, chocolate, maíz, pollo, helado, jamón"),
        ),
        "animal": Fact(
            ("{n} tiene {v}.", "{n} cuida {v}."),
            ("¿Qué animal tiene {n}?", "¿Qué animal cuida {n}?"),
            _list(
                "un perro, un gato, un caballo, un pájaro, un conejo, una oveja, una cabra, un loro, un pez, un ratón, "
                "un pato, una gallina"
            ),
        ),
        "job": Fact(
            ("{n} trabaja como {v}.", "{n} es {v}."),
            ("¿En qué trabaja {n}?", "¿Cuál es el trabajo de {n}?"),
            _list(
                "[profesor|profesora], [panadero|panadera], [médico|médica], [cocinero|cocinera], [pintor|pintora], "
                "[jardinero|jardinera], piloto, [enfermero|enfermera], periodista, [abogado|abogada]"
            ),
        ),
        "age": Fact(("{n} tiene {v} años.",), ("¿Cuántos años tiene {n}?", "¿Qué edad tiene {n}?")),
        "item": Fact(
            ("{n} compró {v} en el mercado.", "En el mercado {n} compró {v}."),
            ("¿Qué compró {n}?", "¿Qué compró {n} en el mercado?"),
            _list(
                "una cesta, una lámpara, un libro, un sombrero, un reloj, un cuchillo, una alfombra, una taza, "
                "una bicicleta, una silla, un bolso, una almohada"
            ),
        ),
    },
    wording={
        "intro": ("Lee el texto y responde a la pregunta.", "Responde con pocas palabras del texto."),
        "quote": ("El texto dice: {s}",),
        "copy": ("Repite esta lista exactamente:", "Copia lo siguiente:"),
        "reverse": ("Invierte esta lista:", "Escribe esta lista al revés:"),
        "up": ("Ordena estos números de menor a mayor:", "Ordena en orden ascendente:"),
        "down": ("Ordena estos números de mayor a menor:", "Ordena en orden descendente:"),
        "ends": ("Primero va {a} y al final {b}.",),
        "extremes": ("El menor es {a} y el mayor es {b}.",),
        "sum": ("¿Cuánto es {q}?", "Calcula {q}."),
        "list": ("Aquí hay una lista de valores:", "Recuerda estos pares:"),
        "pair": ("El valor de {k} es {v}.",),
        "ask": ("¿Cuál es el valor de {k}?", "¿Qué valor tiene {k}?"),
        "many": ("Da los valores de {k}.",),
        "json": ("Extrae {f} como JSON.", "Escribe un objeto JSON con {f}."),
        "jsons": ("Extrae {f} de todos como lista JSON.",),
        "needed": ("Hace falta: {f}.",),
        "hello": ("¡Hola! Soy {n}. ¿Quién eres?", "Buenos días, me llamo {n}. ¿Qué sabes hacer?"),
        "greeted": ("Un saludo de {n}.",),
        "self": (
            "¡Hola {n}! Soy un modelo de demostración muy pequeño. Sé buscar en un texto, ordenar listas y calcular "
            "con dos cifras.",
        ),
    },
    story=Story(
        openings=(
            "Había una vez [un hombre|una mujer] que se llamaba {n} y vivía en {city}.",
            "Una mañana {n} se despertó temprano en {city}.",
            "Hace mucho tiempo {n} vivía en una casa pequeña cerca de {city}.",
        ),
        middles=(
            "El sol brillaba y el cielo estaba claro.",
            "Empezó a llover, y {n} volvió a la casa.",
            "Preparó un té y se sentó junto a la ventana.",
            "{n} y {m} caminaban por el camino y hablaban de otros tiempos.",
            "—¿Adónde vas? —preguntó {m}.",
            "—Voy al mercado y quiero comprar {item} —dijo {n}.",
            "En el jardín había {num} manzanos.",
            "Abrió la puerta y vio {animal} en el patio.",
            "En el bosque todo estaba oscuro y en silencio.",
            "El tren salió a las {hour} y estaba lleno de gente.",
        ),
        endings=("Al final todos volvieron a casa cansados y felices.", "Esa noche hubo {food} para todos."),
    ),
)
